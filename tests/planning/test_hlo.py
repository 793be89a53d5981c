"""Bytes over links, counted in HLO texts that are short enough to count by hand."""

from memsearcher_jax.planning.hlo import count_work

# Layouts and tile sizes as the TPU compiler writes them, and device groups in its three notations.
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


def sent_bytes(program):
    return count_work(program, unknown_trips=1).sent_bytes


GATHERED, SCATTERED = 64 * 128 * 2 * 3 / 4, 64 * 32 * 2 * 3
SUMMED, SWAPPED, MOVED = 2 * 256 * 4 * 3 / 4, 8 * 16 * 4 / 2, 16 * 4


def test_loops_conditionals_and_device_groups_are_counted():
    assert sent_bytes(PROGRAM) == 3 * (GATHERED + SCATTERED) + SUMMED + SWAPPED + MOVED


# An all-gather that overlaps with a matmul, and an all-reduce that is fused with the slice of its result.
FUSED = """\
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


def test_a_collective_split_over_several_fusions_is_counted_once():
    assert sent_bytes(FUSED) == GATHERED + SCATTERED


def test_collectives_on_sparse_cores_are_counted():
    """On a tpu7x the end of their computations names the thread."""
    gathering = PROGRAM[PROGRAM.index("%gathering") : PROGRAM.index("%body")]
    sparse = PROGRAM.replace(gathering, gathering.replace("\n}", '\n}, execution_thread="sparsecore"'))
    assert sparse != PROGRAM and sent_bytes(sparse) == sent_bytes(PROGRAM)


def test_operations_and_cycles_are_counted_with_the_trips_of_their_loops():
    """Excerpts of a decode program: what names or reserves memory is no operation, nor a copy that overlaps."""
    program = """\
HloModule jit_decode, is_scheduled=true

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %old = f32[8]{0:T(128)S(1)} get-tuple-element(%state), index=1
  %room = f32[8]{0:T(128)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %fetched = (f32[8]{0:T(128)S(1)}, f32[8]{0:T(128)}, u32[]{:S(2)}) copy-start(%old)
  %out = ((f32[8]{0:T(128)S(1)}), f32[8]{0}) fusion(%old), backend_config={"window_config":{"estimated_cycles":"700"}}
  %kernel = f32[8]{0} custom-call(%old), custom_call_target="tpu_custom_call", backend_config={"x":"estimated_cycles"}
  %here = f32[8]{0:T(128)S(1)} copy-done(%fetched)
  ROOT %next = (s32[], f32[8]) tuple(%count, %here)
}

%condition (state: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(32)
  ROOT %more = pred[]{:T(512)} compare(%count, %limit), direction=LT
}

%open (state: (s32[], f32[8])) -> pred[] {
  ROOT %more = pred[]{:T(512)} compare(%count, %given), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %loop = (s32[], /*index=1*/f32[8]{0:T(128)}) while(%start), condition=%condition, body=%body
  %choice = f32[] conditional(%which, %x, %x), branch_computations={%body, %condition}
  ROOT %copy = f32[8]{0} copy(%x), backend_config={"window_config":{"estimated_cycles":"50"}}
}
"""
    work = count_work(program, unknown_trips=1)
    assert work.operations == 32 * (2 + 1) + 2 + 1
    assert work.cycles == 33 * 700 + 50
    unknown = count_work(program.replace("condition=%condition", "condition=%open"), unknown_trips=5)
    assert unknown.operations == 5 * (2 + 1) + 2 + 1
