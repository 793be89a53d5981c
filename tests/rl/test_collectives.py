"""Bytes over links, counted in texts short enough to count by hand."""

import pytest

from memsearcher_jax.rl.collectives import link_bytes

# Layouts and tile sizes as the TPU compiler writes them; of groups, each of its three ways.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%gathering (p: bf16[64,32]) -> bf16[64,128] {
  ROOT %all-gather.1 = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={1}
}

%body (state: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %begun = ((bf16[64,32]), bf16[64,128], u32[]{:S(8)}) async-start(%part), calls=%gathering
  %ended = bf16[64,128] async-done(%begun), calls=%gathering
  %scattered = bf16[64,32]{0,1} reduce-scatter(%ended), replica_groups=[2,4]<=[8], dimensions={1}, to_apply=%add
}

%condition (state: (s32[], bf16[64,32])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  ROOT %more = pred[] compare(%count, %limit), direction=LT
}

%open (state: (s32[], bf16[64,32])) -> pred[] {
  ROOT %more = pred[] compare(%count, %given), direction=LT
}

%little (p: f32[]) -> f32[] {
  ROOT %nothing = f32[] copy(%p)
}

%much (p: f32[]) -> f32[] {
  ROOT %summed = f32[256]{0} all-reduce(%p), replica_groups=mesh['a'=2, 'b'=4] {'b'}, to_apply=%add
}

ENTRY %main (x: bf16[64,32]) -> f32[] {
  %loop = (s32[], bf16[64,32]) while(%start), condition=%condition, body=%body
  %choice = f32[] conditional(%which, %x, %x), branch_computations={%little, %much}
  %swapped = f32[8,16]{1,0} all-to-all(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  %moved = (f32[16], f32[16], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
}
"""
GATHERED, SCATTERED = 64 * 128 * 2 * 3 / 4, 64 * 32 * 2 * 3
SUMMED, SWAPPED, MOVED = 2 * 256 * 4 * 3 / 4, 8 * 16 * 4 / 2, 16 * 4


def test_loops_choices_and_groups_are_counted():
    assert link_bytes(PROGRAM, loops=1) == {
        "all-gather": 3 * GATHERED,
        "reduce-scatter": 3 * SCATTERED,
        "all-reduce": SUMMED,
        "all-to-all": SWAPPED,
        "collective-permute": MOVED,
    }


# As the compiler writes a gather beside products, and a sum of which each device cuts its part in the same kernel.
PIECES = """\
%beginning (p: bf16[64,32]) -> (bf16[64,32], bf16[64,128]) {
  %all-gather.1 = bf16[64,128] all-gather(%p), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
}

%async_collective_fusion.1 (p: bf16[64,32]) -> bf16[64,128] {
  %all-gather.2 = bf16[64,128] all-gather(%p), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
}

%ending (p: bf16[64,32]) -> bf16[64,128] {
  %all-gather.3 = bf16[64,128] all-gather(%p), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.1 (input: bf16[64,128]) -> bf16[64,32] {
  %all-reduce.1 = bf16[64,128] all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = bf16[64,32] dynamic-slice(%all-reduce.1, %zero, %place), dynamic_slice_sizes={64,32}
}

ENTRY %main (x: bf16[64,32]) -> bf16[64,32] {
  %async-collective-start = (bf16[64,32], bf16[64,128]) fusion(%x), kind=kCustom, calls=%beginning
  %product = (bf16[8,8], bf16[64,128]) fusion(%x, %y), kind=kOutput, calls=%async_collective_fusion.1
  %async-collective-done = bf16[64,128] fusion(%y), kind=kCustom, calls=%ending
  ROOT %fusion.1 = bf16[64,32] fusion(%async-collective-done), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_what_is_written_in_pieces_is_sent_once():
    assert link_bytes(PIECES, loops=1) == {"all-gather": 64 * 128 * 2 * 3 / 4, "reduce-scatter": 64 * 32 * 2 * 3}


@pytest.mark.parametrize("loops", [1, 5])
def test_a_loop_without_a_number_takes_the_one_that_is_given(loops):
    program = PROGRAM.replace("condition=%condition", "condition=%open")
    assert link_bytes(program, loops=loops)["all-gather"] == loops * GATHERED


def test_a_program_on_one_device_sends_nothing():
    assert (
        link_bytes("HloModule one\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT %y = f32[2] copy(%x)\n}\n", loops=1)
        == {}
    )


def test_what_runs_beside_the_program_is_counted():
    """On a tpu7x collectives run on the sparse cores, and their computations end with saying so."""
    gathering = PROGRAM[PROGRAM.index("%gathering") : PROGRAM.index("%body")]
    beside = PROGRAM.replace(gathering, gathering.replace("\n}", '\n}, execution_thread="sparsecore"'))
    assert beside != PROGRAM
    assert link_bytes(beside, loops=1) == link_bytes(PROGRAM, loops=1)
