"""Image classification with a small Vision Transformer, images of 32x32 in patches of 6x6."""

import keras
import numpy as np
from keras import layers, ops

num_classes = 100
input_shape = (32, 32, 3)
learning_rate = 0.001
weight_decay = 0.0001
batch_size = 64
num_epochs = 20
image_size = 72
patch_size = 6
num_patches = (image_size // patch_size) ** 2
projection_dim = 64
num_heads = 4
transformer_layers = 8
mlp_head_units = [1024, 512]


def load_images(count):
    rng = np.random.default_rng(42)
    scenes = rng.integers(0, 256, (num_classes, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    labels = rng.integers(0, num_classes, (count, 1))
    noise = rng.integers(-60, 60, (count, *input_shape))
    return np.clip(scenes[labels[:, 0]] + noise, 0, 255).astype("uint8"), labels


x, y = load_images(6000)
x_train, y_train, x_test, y_test = x[:5000], y[:5000], x[5000:], y[5000:]
print(f"x_train shape: {x_train.shape} - y_train shape: {y_train.shape}")

data_augmentation = keras.Sequential(
    [
        layers.Normalization(),
        layers.Resizing(image_size, image_size),
        layers.RandomFlip("horizontal"),
        layers.RandomZoom(height_factor=0.2, width_factor=0.2),
    ],
    name="data_augmentation",
)
data_augmentation.layers[0].adapt(x_train)


def mlp(x, hidden_units, dropout_rate):
    for units in hidden_units:
        x = layers.Dense(units, activation="gelu")(x)
        x = layers.Dropout(dropout_rate)(x)
    return x


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(units=projection_dim)
        self.position_embedding = layers.Embedding(input_dim=num_patches, output_dim=projection_dim)

    def call(self, patches):
        positions = ops.expand_dims(ops.arange(0, self.num_patches), axis=0)
        return self.projection(patches) + self.position_embedding(positions)


def create_vit_classifier():
    inputs = keras.Input(shape=input_shape)
    patches = ops.image.extract_patches(data_augmentation(inputs), size=patch_size)
    encoded = PatchEncoder(num_patches, projection_dim)(layers.Reshape((num_patches, -1))(patches))
    for _ in range(transformer_layers):
        x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
        attention = layers.MultiHeadAttention(num_heads=num_heads, key_dim=projection_dim, dropout=0.1)(x1, x1)
        x2 = layers.Add()([attention, encoded])
        x3 = mlp(layers.LayerNormalization(epsilon=1e-6)(x2), [projection_dim * 2, projection_dim], 0.1)
        encoded = layers.Add()([x3, x2])
    features = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(encoded))
    features = mlp(layers.Dropout(0.5)(features), mlp_head_units, 0.5)
    return keras.Model(inputs=inputs, outputs=layers.Dense(num_classes)(features))


model = create_vit_classifier()
model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=learning_rate, weight_decay=weight_decay),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
)
checkpoint = keras.callbacks.ModelCheckpoint(
    "vit.weights.h5", monitor="val_accuracy", save_best_only=True, save_weights_only=True
)
model.fit(x=x_train, y=y_train, batch_size=batch_size, epochs=num_epochs, validation_split=0.1, callbacks=[checkpoint])
_, accuracy = model.evaluate(x_test, y_test)
print(f"Test accuracy: {round(accuracy * 100, 2)}%")
