import numpy as np
import tensorflow as tf

np.random.seed(0)
tf.random.set_seed(0)

learning_rate = 0.01
training_epochs = 8
batch_size = 50
display_step = 1

# two interleaved spirals
n_points = 1000
theta = np.sqrt(np.random.rand(n_points)) * 2 * np.pi
r = 2 * theta + np.pi
spiral = np.c_[np.cos(theta) * r, np.sin(theta) * r]
train_X = np.r_[spiral, -spiral] + np.random.randn(2 * n_points, 2) * 0.4
train_X = (train_X / 10).astype(np.float32)
train_Y = np.r_[np.zeros(n_points), np.ones(n_points)].astype(np.float32).reshape(-1, 1)
p = np.random.permutation(2 * n_points)
train_X, train_Y = train_X[p], train_Y[p]
test_X, test_Y = train_X[1600:], train_Y[1600:]
train_X, train_Y = train_X[:1600], train_Y[:1600]


class SpiralNet(tf.keras.Model):
    def __init__(self):
        super(SpiralNet, self).__init__()
        self.fc1 = tf.keras.layers.Dense(64, activation=tf.nn.tanh)
        self.fc2 = tf.keras.layers.Dense(64, activation=tf.nn.tanh)
        self.out = tf.keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.fc2(self.fc1(x)))


net = SpiralNet()
optimizer = tf.keras.optimizers.Adam(learning_rate)


def cross_entropy(y_pred, y_true):
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y_true, logits=y_pred))


def accuracy(y_pred, y_true):
    correct = tf.equal(tf.cast(y_pred > 0, tf.float32), y_true)
    return tf.reduce_mean(tf.cast(correct, tf.float32))


def run_optimization(x, y):
    with tf.GradientTape() as g:
        pred = net(x)
        loss = cross_entropy(pred, y)
    gradients = g.gradient(loss, net.trainable_variables)
    optimizer.apply_gradients(zip(gradients, net.trainable_variables))
    return loss


n_batches = len(train_X) // batch_size
for epoch in range(training_epochs):
    perm = np.random.permutation(len(train_X))
    avg_loss = 0.0
    for i in range(n_batches):
        idx = perm[i * batch_size : (i + 1) * batch_size]
        batch_x, batch_y = train_X[idx], train_Y[idx]
        avg_loss += run_optimization(batch_x, batch_y).numpy() / n_batches
    if (epoch + 1) % display_step == 0:
        print("epoch: %i, loss: %f, test accuracy: %f" % (epoch + 1, avg_loss, accuracy(net(test_X), test_Y)))

net.save_weights("spiral.weights.h5")
print("Test Accuracy: %f" % accuracy(net(test_X), test_Y))
