import math

import keras
import numpy as np


class DataGenerator(keras.utils.PyDataset):
    """Generates batches of noisy spectrogram-like images."""

    def __init__(self, list_ids, labels, batch_size=32, dim=(16, 16), n_channels=1, shuffle=True, **kwargs):
        super().__init__(**kwargs)
        self.list_ids = list_ids
        self.labels = labels
        self.batch_size = batch_size
        self.dim = dim
        self.n_channels = n_channels
        self.shuffle = shuffle
        self.rng = np.random.default_rng(0)
        self.on_epoch_end()

    def __len__(self):
        return math.ceil(len(self.list_ids) / self.batch_size)

    def __getitem__(self, index):
        indexes = self.indexes[index * self.batch_size : (index + 1) * self.batch_size]
        X = np.empty((len(indexes), *self.dim, self.n_channels), dtype="float32")
        y = np.empty((len(indexes),), dtype="int64")
        for i, k in enumerate(indexes):
            X[i] = self._load(self.list_ids[k], self.labels[k])
            y[i] = self.labels[k]
        return X, y

    def on_epoch_end(self):
        self.indexes = np.arange(len(self.list_ids))
        if self.shuffle:
            self.rng.shuffle(self.indexes)

    def _load(self, sample_id, label):
        # stands for np.load('data/' + sample_id + '.npy')
        rng = np.random.default_rng(int(sample_id))
        xs = np.linspace(0, 2 * np.pi, self.dim[1])
        wave = np.sin((label + 1) * xs + rng.uniform(0, 2 * np.pi))
        return (wave[None, :, None] + rng.normal(scale=0.8, size=(*self.dim, self.n_channels))).astype("float32")
