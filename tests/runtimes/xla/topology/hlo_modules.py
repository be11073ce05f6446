"""Small HLO modules, made field by field as XLA serializes them."""

from mtf_gradsync.runtimes._private.tensorflow import hlo_module, xla_element_types

TYPES = xla_element_types()

# Numbers of fields that older TensorFlows do not know (``xla/service/hlo.proto``).
COLLECTIVE_DEVICE_LIST, IOTA_DEVICE_LIST, MESH_AXES = 87, 92, 93


class Module:
    """A module under construction.

    Attributes:
      proto: the ``HloModuleProto``.
    """

    def __init__(self):
        self.proto = hlo_module(b"")

    def computation(self, name, *instructions, entry=False):
        """Adds a computation; `instructions` come from `instruction`. Returns its id."""
        computation = self.proto.computations.add()
        computation.id, computation.name = len(self.proto.computations), name
        ids = {}
        for make in instructions:
            added = computation.instructions.add()
            added.id = ids[make.name] = (computation.id << 32) + len(ids)
            make.fill(added, ids)
        if entry:
            self.proto.entry_computation_id = computation.id
        return computation.id

    def serialized(self):
        return self.proto.SerializeToString()


class instruction:
    """One instruction: its name, type of operation, shape, and names of its operands."""

    def __init__(self, name, opcode, shape, operands=(), calls=(), groups=None, raw=b""):
        self.name, self.opcode, self.shape, self.operands = name, opcode, shape, operands
        self.calls, self.groups, self.raw = calls, groups, raw

    def fill(self, proto, ids):
        # Unknown fields, if any, stay in the message as they would after reading it from a file.
        proto.MergeFromString(self.raw)
        proto.name, proto.opcode = self.name, self.opcode
        fill_shape(proto.shape, self.shape)
        proto.operand_ids.extend(ids[name] for name in self.operands)
        proto.called_computation_ids.extend(self.calls)
        if self.opcode.startswith("collective-permute"):
            for source, target in self.groups or ():
                proto.source_target_pairs.add(source=source, target=target)
        else:
            for group in self.groups or ():
                proto.replica_groups.add(replica_ids=group)


def fill_shape(proto, shape):
    """`shape` is ("F32", sizes...), or a list of shapes for a tuple."""
    if isinstance(shape, list):
        proto.element_type = TYPES["TUPLE"]
        for part in shape:
            fill_shape(proto.tuple_shapes.add(), part)
    else:
        kind, *sizes = shape
        proto.element_type = TYPES[kind] if isinstance(kind, str) else kind
        proto.dimensions.extend(sizes)


def device_list(groups):
    """Groups as newer versions of XLA write them, as raw bytes of the wire format."""
    messages = (_field(1, _field(1, bytes(group))) for group in groups)
    return _field(COLLECTIVE_DEVICE_LIST, b"".join(messages))


def iota_list(num_groups, group_size, reshape, transpose):
    """Groups that count up through an array, as raw bytes of the wire format."""
    sizes = _number(1, num_groups) + _number(2, group_size)
    return _field(IOTA_DEVICE_LIST, sizes + _field(3, bytes(reshape)) + _field(4, bytes(transpose)))


def iota_in_device_list(num_groups, group_size, reshape, transpose):
    """The same where XLA of 2024 wrote it."""
    sizes = _number(1, num_groups) + _number(2, group_size)
    inner = sizes + _field(3, bytes(reshape)) + _field(4, bytes(transpose))
    return _field(COLLECTIVE_DEVICE_LIST, _field(2, inner))


def mesh_axes():
    """Groups that are named by the axes of a mesh, as raw bytes of the wire format."""
    return _field(MESH_AXES, _field(1, b""))


def _field(number, content):
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number, value):
    return _varint(number << 3) + _varint(value)


def _varint(value):
    low, rest = value & 127, value >> 7
    return bytes([low]) if not rest else bytes([low | 128]) + _varint(rest)


# A module as XLA prints it.
TEXT = """\
HloModule step, entry_computation_layout={(f32[4]{0})->(f32[4]{0})}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(f32[] %a, f32[] %b)
}

%yes (t: (f32[4])) -> (f32[4]) {
  %t = (f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element((f32[4]{0}) %t), index=0
  %r = f32[4]{0} all-reduce(f32[4]{0} %x), replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %out = (f32[4]{0}) tuple(f32[4]{0} %r)
}

%no (t: (f32[4])) -> (f32[4]) {
  ROOT %t2 = (f32[4]{0}) parameter(0)
}

%body (t: (f32[4])) -> (f32[4]) {
  %t3 = (f32[4]{0}) parameter(0)
  %p = pred[] constant(true)
  ROOT %c = (f32[4]{0}) conditional(%p, %t3, %t3), true_computation=%yes, false_computation=%no
}

%test (t: (f32[4])) -> pred[] {
  %t4 = (f32[4]{0}) parameter(0)
  ROOT %q = pred[] constant(false)
}

%gather (g: f32[4]) -> f32[16] {
  %g1 = f32[4]{0} parameter(0)
  ROOT %all = f32[16]{0} all-gather(%g1), replica_groups={{0,1,2,3}}, dimensions={0}
}

%fused (x: f32[4]) -> (bf16[8,2], pred[3]) {
  %x5 = bf16[8,2]{1,0} constant({...})
  %y5 = pred[3]{0} constant({...})
  ROOT %both = (bf16[8,2]{1,0}, pred[3]{0}) all-to-all(%x5, %y5), replica_groups={{0,2},{1,3}}
}

ENTRY %main (arg: f32[4]) -> (f32[4]) {
  %arg = f32[4]{0} parameter(0)
  %i = s32[] constant(0)
  %start = f32[4]{0} all-reduce-start(f32[4]{0} %arg), replica_groups={}, to_apply=%sum
  %done = f32[4]{0} all-reduce-done(f32[4]{0} %start)
  %f = (bf16[8,2]{1,0}, pred[3]{0}) call(%arg), to_apply=%fused
  %tuple = (f32[4]{0}) tuple(%done)
  %w = (f32[4]{0}) while((f32[4]{0}) %tuple), condition=%test, body=%body
  %g = ((f32[4]{0}), f32[16]{0}) async-start(f32[4]{0} %done), calls=%gather
  %gd = f32[16]{0} async-done(%g)
  %moved = f32[4]{0} collective-permute(%done), source_target_pairs={{0,1},{1,0}}
  ROOT %again = (f32[4]{0}) conditional(s32[] %i, %w, %w), branch_computations={%yes, %no}
}
"""


# What stands in it: operation, name, bytes, groups, computation, and what is around.
FOUND = [
    ("all-reduce", "start", 16, (), "main", ()),
    ("all-to-all", "both", 8 * 2 * 2 + 3, ((0, 2), (1, 3)), "fused", ()),
    ("all-reduce", "r", 16, ((0, 1, 2, 3),), "yes", ("body of w", "branch true of c")),
    ("all-gather", "all", 16, ((0, 1, 2, 3),), "gather", ()),
    ("collective-permute", "moved", 16, ((0, 1), (1, 0)), "main", ()),
    ("all-reduce", "r", 16, ((0, 1, 2, 3),), "yes", ("branch 0 of again",)),
]
