"""Reading collectives out of HLO text; needs neither jax nor a new TensorFlow."""

import pytest

from mtf_gradsync import xla

MODULE = """\
HloModule step, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

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
  ROOT %c = (f32[4]{0}) conditional(%p, %t3, %t3), true_computation=%yes, false_computation=%no
}

%test (t: (f32[4])) -> pred[] {
  %t4 = (f32[4]{0}) parameter(0)
  ROOT %p = pred[] constant(false)
}

%fused (x: bf16[8,2], y: pred[3]) -> (bf16[8,2], pred[3]) {
  %x5 = bf16[8,2]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %y5 = pred[3]{0:T(512)(4,1)} parameter(1)
  %both = (bf16[8,2], pred[3]{0:T(8)}) all-reduce(%x5, %y5), replica_groups=[2,2]<=[2,2]T(1,0)
}

ENTRY %main (arg: f32[4]) -> f32[4] {
  %arg = f32[4]{0} parameter(0)
  %start = f32[4]{0} all-reduce-start(f32[4]{0} %arg), replica_groups={}, to_apply=%sum
  %done = f32[4]{0} all-reduce-done(f32[4]{0} %start)
  %f = (bf16[8,2]{1,0}, pred[3]{0}) fusion(%arg), kind=kCustom, calls=%fused
  %w = (f32[4]{0}) while((f32[4]{0}) %tuple), condition=%test, body=%body
  %g = f32[16]{0} all-gather(f32[4]{0} %done), replica_groups=[1,4]<=[4], dimensions={0}
  %moved = f32[4]{0} collective-permute(%done), source_target_pairs={{0,1},{1,0}}
  ROOT %again = (f32[4]{0}) conditional(s32[] %i, %w, %w), branch_computations={%yes, %no}
}
"""


def test_lists_each_collective_with_what_is_around_it():
    found = xla.find_hlo_collectives(MODULE)
    assert [(c.operation, c.bytes_per_core, c.inside) for c in found] == [
        ("all-reduce", 16, ()),
        ("all-reduce", 8 * 2 * 2 + 3, ()),
        ("all-reduce", 16, ("body of w", "branch true of c")),
        ("all-gather", 16, ()),
        ("collective-permute", 16, ()),
        ("all-reduce", 16, ("branch 0 of again",)),
    ]
    assert [c.is_conditional for c in found] == [False, False, True, False, False, True]
    assert [c.is_in_loop for c in found] == [False, False, True, False, False, False]


def test_reads_groups_in_every_spelling():
    found = xla.find_hlo_collectives(MODULE)
    assert [c.groups for c in found] == [
        (),
        ((0, 2), (1, 3)),
        ((0, 1, 2, 3),),
        ((0, 1, 2, 3),),
        ((0, 1), (1, 0)),
        ((0, 1, 2, 3),),
    ]


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        xla.find_hlo_collectives("module @main {}")
