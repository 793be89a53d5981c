"""Operations and cycles, counted in an HLO text that is short enough to count by hand."""

from memsearcher_jax.planning.hlo import count_work


def test_operations_and_cycles_are_counted_with_the_trips_of_their_loops():
    """Excerpts of a decode program: what names or reserves memory is no operation, nor a copy that overlaps.

    On a tpu7x the end of a computation can name its thread.
    """
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
}, execution_thread="sparsecore"

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
