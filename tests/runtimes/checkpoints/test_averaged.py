import os

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.checkpoints import NoAveragesError, averaged_checkpoint


def checkpoint(directory, **values):
    with tf.Graph().as_default(), tf.Session() as session:
        made = [
            tf.get_variable(name.replace("__", "/"), initializer=x) for name, x in values.items()
        ]
        session.run(tf.global_variables_initializer())
        return tf.train.Saver(made).save(session, str(directory / "model.ckpt-7"))


def test_averages_take_the_variables_names_and_dtypes(tmp_path):
    average = np.float32([0.1, 3.0])
    path = checkpoint(
        tmp_path,
        w=np.array([1.0, 2.0], tf.bfloat16.as_numpy_dtype),
        w__ExponentialMovingAverage=average,
        plain=np.float32(4),
        slot=np.float32(5),
    )
    with tf.Graph().as_default():
        restored = [tf.get_variable("w", [2], tf.bfloat16), tf.get_variable("plain", [])]
        with averaged_checkpoint(path, restored) as copy:
            assert os.path.basename(copy) == "model.ckpt-7"
            with tf.Session() as session:
                tf.train.Saver(restored).restore(session, copy)
                w, plain = session.run(restored)
            assert [name for name, _ in tf.train.list_variables(copy)] == ["plain", "w"]
        np.testing.assert_array_equal(w, average.astype(tf.bfloat16.as_numpy_dtype))
        assert plain == 4
        assert not os.path.exists(os.path.dirname(copy))
        with pytest.raises(NoAveragesError, match="no moving averages"):
            averaged_checkpoint(path, restored[1:]).__enter__()
