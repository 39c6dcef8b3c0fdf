from tensorflow.keras import Sequential, layers


def make_generator_model(latent_dim):
    model = Sequential(name="generator")
    model.add(layers.Input(shape=(latent_dim,)))
    model.add(layers.Dense(2 * 2 * 64, use_bias=False))
    model.add(layers.BatchNormalization())
    model.add(layers.LeakyReLU())
    model.add(layers.Reshape((2, 2, 64)))
    model.add(layers.Conv2DTranspose(32, 3, strides=2, padding="same", use_bias=False))
    model.add(layers.BatchNormalization())
    model.add(layers.LeakyReLU())
    model.add(layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"))
    assert model.output_shape == (None, 8, 8, 1)
    return model


def make_discriminator_model():
    model = Sequential(name="discriminator")
    model.add(layers.Input(shape=(8, 8, 1)))
    model.add(layers.Conv2D(32, 3, strides=2, padding="same"))
    model.add(layers.LeakyReLU())
    model.add(layers.Dropout(0.3))
    model.add(layers.Conv2D(64, 3, strides=2, padding="same"))
    model.add(layers.LeakyReLU())
    model.add(layers.Dropout(0.3))
    model.add(layers.Flatten())
    model.add(layers.Dense(1))
    return model
