# Fraud detection: highly imbalanced binary classification with class weights
import keras
import numpy as np
from sklearn.metrics import classification_report, confusion_matrix
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

EPOCHS = 10
BATCH_SIZE = 128
SEED = 2024

keras.utils.set_random_seed(SEED)
rng = np.random.default_rng(SEED)

# 2% frauds, shifted in a few of the features
n, n_features = 20000, 29
y = (rng.random(n) < 0.02).astype(int)
X = rng.normal(size=(n, n_features))
X[y == 1, :6] += 1.2
X[:, -1] = np.exp(X[:, -1])

X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=SEED, stratify=y)
scaler = StandardScaler()
X_train = scaler.fit_transform(X_train)
X_test = scaler.transform(X_test)

neg, pos = np.bincount(y_train)
total = neg + pos
print("Examples:\n    Total: {}\n    Positive: {} ({:.2f}% of total)\n".format(total, pos, 100 * pos / total))
class_weight = {0: (1 / neg) * (total / 2.0), 1: (1 / pos) * (total / 2.0)}
print("Weight for class 0: {:.2f}".format(class_weight[0]))
print("Weight for class 1: {:.2f}".format(class_weight[1]))

METRICS = [
    keras.metrics.BinaryAccuracy(name="accuracy"),
    keras.metrics.Precision(name="precision"),
    keras.metrics.Recall(name="recall"),
    keras.metrics.AUC(name="auc"),
]

model = keras.Sequential(
    [
        keras.layers.Input(shape=(n_features,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.4),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dropout(0.4),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="binary_crossentropy", metrics=METRICS)

early_stopping = keras.callbacks.EarlyStopping(
    monitor="val_auc", verbose=1, patience=5, mode="max", restore_best_weights=True
)
model.fit(
    X_train,
    y_train,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    validation_split=0.2,
    class_weight=class_weight,
    callbacks=[early_stopping],
    verbose=2,
)

y_pred = (model.predict(X_test, verbose=0) > 0.5).astype(int).ravel()
print(confusion_matrix(y_test, y_pred))
print(classification_report(y_test, y_pred, target_names=["normal", "fraud"]))
for name, value in model.evaluate(X_test, y_test, verbose=0, return_dict=True).items():
    print(name, ": ", value)
model.save("fraud_model.keras")
