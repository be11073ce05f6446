"""Programs of a few lines that tests of XLA run and compile."""

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf


class Conditional:
    """Every second step, and only then, sums over the cores and assigns."""

    def __init__(self):
        self.x = tf.placeholder(tf.float32, [4], "x")
        parts = [self.x * float(core) for core in range(8)]
        with tf.variable_scope("", use_resource=True):
            zeros = tf.zeros_initializer()
            total = tf.get_variable("total", [4], initializer=zeros)
            count = tf.get_variable("count", [], tf.int32, initializer=zeros)
        with simd.tpu_program("all:8", "batch:all") as self.program:
            mine = self.program.per_replica(parts)
            now = tf.identity(count.read_value())

            def update():
                summed = tf.tpu.cross_replica_sum(mine, [list(range(8))])
                with tf.control_dependencies([total.assign_add(summed)]):
                    return tf.reduce_sum(summed)

            def turn(i, x):
                pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
                return i + 1, tf.tpu.cross_replica_sum(x, pairs) * 0.5

            self.updated = tf.cond(tf.equal(now % 2, 1), update, lambda: tf.zeros([]))
            _, self.averaged = tf.while_loop(lambda i, x: i < 3, turn, [tf.constant(0), mine])
            count.assign_add(1)

    @property
    def fetches(self):
        return [self.updated, self.averaged]
