"""The schedule reader: syntax, loops, units, memory, and whole dumps of two compiler versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.analysis.bundles import Listing, read_listing
from kernels.analysis.dump import DumpError, kernel_files
from kernels.analysis.loops import Flow
from kernels.analysis.machine import MACHINES, machine_of
from kernels.analysis.occupancy import Occupancy, occupancy
from kernels.analysis.prediction import CONTEXTS, StepFacts, WorkFacts, predict, predict_step
from kernels.analysis.schedule import (
    Cost,
    KernelSchedule,
    LoopReport,
    Transfer,
    read_schedule,
)
from kernels.analysis.tables import read_allocations, read_slot_use
from kernels.chips import CHIPS

DUMPS = Path(__file__).parent / "fixtures" / "kernel_dumps"
V6E = next(machine for machine in MACHINES if "v6e" in machine.chips)


def listing(tmp_path: Path, *bundles: str) -> Listing:
    """A listing of bundles given as `marks | code | regions`, numbered as the compiler would."""
    lines = ["= control target key start", "LB: loop body", "= control target key end", ""]
    for index, bundle in enumerate(bundles):
        marks, code, regions = (part.strip() for part in bundle.split("|"))
        number = f"{index:#x}" if index else "0"
        tail = f" /* {regions} */" if regions else ""
        lines.append(f"  {number:>4} {marks} : > {{ {code} }}{tail}")
    path = tmp_path / "1-k-00-final_bundles.txt"
    path.write_text("\n".join(lines) + "\n")
    return read_listing(path)


def read(name: str) -> KernelSchedule:
    (files,) = kernel_files(DUMPS / name)
    return read_schedule(files)


# --- syntax ------------------------------------------------------------------------------------


def test_a_bundle_is_split_into_instructions_without_its_comments(tmp_path: Path) -> None:
    dma = (
        "%7 = dma.hbm_to_vmem [thread:$0]  (!%p1_p0), /*hbm=*/%s2, /*size_in_granules=*/2048, "
        "/*vmem=*/%s3 /* \nbase_bounds: (2, 1)\n ;; not code */"
    )
    read = listing(tmp_path, f"| %v1 = vadd.f32 %v2, %v3  ;;  {dma}  ;;  %9 = vdelay 5 |")
    (bundle,) = read.bundles
    add, transfer, delay = bundle.instructions
    assert (add.opcode, add.is_predicated, add.delay) == ("vadd.f32", False, 0)
    assert (transfer.is_transfer, transfer.is_predicated, transfer.granules) == (True, True, 2048)
    assert (delay.delay, bundle.cycles) == (5, 6)


def test_waits_are_no_transfers(tmp_path: Path) -> None:
    (bundle,) = listing(tmp_path, "| %1 = dma.done.wait [#allocation1], 128 |").bundles
    (wait,) = bundle.instructions
    assert (wait.is_wait, wait.is_transfer) == (True, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no bundles"),
        ("   0   :  { %1 = snop }\n 0x2  : { %2 = snop }\n", ":2: bundle 0x2 where 0x1 was due"),
        ("   0   :  { %1 = snop\n", ":1: a bundle without its closing brace"),
        ("   0   :  { 12 }\n", ":1: not an instruction: 12"),
    ],
)
def test_a_broken_listing_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "1-k-00-final_bundles.txt"
    path.write_text(text)
    with pytest.raises(DumpError) as error:
        read_listing(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_files_of_a_dump_are_found_by_kernel(tmp_path: Path) -> None:
    for name in (
        "12-a-b.1-03-final_bundles.txt",
        "12-a-b.1-02-schedule-analysis_final_bundles.txt",
        "12-a-b.1-01-packed-bundles-post-ra.txt",
        "12-TLP-03-final_bundles.txt",
        "12-<late-initialization>-03-final_bundles.txt",
        "13-c-03-final_bundles.txt.gz",
        "14-d-02-pre-finalize-registers-and-allocations.txt",
    ):
        (tmp_path / name).touch()
    first, second = kernel_files(tmp_path)
    assert (first.name, first.final.name) == ("a-b.1", "12-a-b.1-03-final_bundles.txt")
    assert first.timed is not None
    assert (second.name, second.timed, second.slots) == ("c", None, None)
    with pytest.raises(DumpError, match="no such folder"):
        kernel_files(tmp_path / "absent")


def test_both_headers_of_the_slot_table_are_read(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    rest = "XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"
    path.write_text(f"== X:\nMXU, {rest}\n 2 2 4 2 1 3 3 2 2 2\n== Y:\n1 0 3 0 0 2 1 0 0 1\n")
    old = read_slot_use(path)
    path.write_text(
        f"== X:\nMATMUL, MATPUSH, {rest}\n 2 2 2 4 2 1 3 3 2 2 2\n== Y:\n1 2 0 3 0 0 2 1 0 0 1\n"
    )
    new = read_slot_use(path)
    assert (old.capacity["MXU"], old.used[0]["MXU"], old.used[0]["FILL"]) == (2, 1, 1)
    assert (new.used[0]["MXU"], new.used[0]["VALU"]) == (3, 3)
    path.write_text(f"MXU, {rest}\n 2 2 4\n")
    with pytest.raises(DumpError, match=r"table\.txt:2: 3 numbers for 10 columns"):
        read_slot_use(path)


def test_memory_is_what_the_kernel_takes_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "allocations.txt"
    path.write_text(
        "  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs]\n"
        "  #allocation1 [shape = 'f32[8]', space=vmem, size = 0x1000, scoped, tag = 'scratch']\n"
        "    #allocation9 [shape = 'u8[4]', space=vmem, size = 4096, scoped, tag = 'window']\n"
        "  %s1 = spseudo.reserve\n"
    )
    assert read_allocations(path) == {"vmem": 8192}


# --- control flow ------------------------------------------------------------------------------

IF_ELSE = (
    "LB | %p1 = scmp.lt.s32.totalorder %s1, 0 | Start region 1",
    "| %1 = sbr.rel (%p1) target = $region3 |",  # to the else side
    *["| %2 = snop |"] * 4,  # delay slots
    "| %3 = sbr.rel target = $region4 |",  # the if side: 5 bundles, ends by jumping past the else
    *["| %4 = vadd.f32 %v1, %v1 |"] * 4,
    *["| %5 = vmul.f32 %v1, %v1 | Start region 3"] * 9,  # the else side
    "| %6 = sbr.rel (!%p1) target = $region1 | Start region 4",
    *["| %7 = snop |"] * 3,
    "| %7 = snop | End region 1",
    "| %8 = vsub.f32 %v1, %v1 |",
)


def test_a_way_takes_one_side_of_an_if(tmp_path: Path) -> None:
    flow = Flow(listing(tmp_path, *IF_ELSE), 4, is_squeezed=False)
    (loop,) = flow.loops().children
    assert (loop.first, loop.last) == (0, 24)
    assert flow.loops().own() == [25]
    assert flow.way(loop, [(1,)] * 26) == [*range(6), *range(11, 25)]
    # Heavy bundles of the shorter side make it the heavier way; of equal ways the short one wins.
    heavy = [(int(index == 7), -1) for index in range(26)]
    assert flow.way(loop, heavy) == [*range(11), *range(20, 25)]
    assert flow.way(loop, [(0, -1)] * 26) == [*range(11), *range(20, 25)]
    (body,) = flow.optional_bodies(loop)
    assert (body.branch, body.first, body.last) == (1, 6, 10)


def test_a_jumped_over_body_is_not_on_the_way(tmp_path: Path) -> None:
    read = listing(
        tmp_path,
        "| %1 = sbr.rel (%p1) target = $region2 |",
        *["| %2 = snop |"] * 4,
        *["| %3 = vadd.f32 %v1, %v1 |"] * 3,
        "| %4 = snop | Start/End empty region 2",
    )
    flow = Flow(read, 4, is_squeezed=False)
    root = flow.loops()
    bodies = flow.optional_bodies(root)
    assert [(body.first, body.last) for body in bodies] == [(5, 7)]
    assert flow.way(root, [(-1,)] * 9) == [0, 1, 2, 3, 4, 8]
    assert flow.way(root, [(1,)] * 9) == list(range(9))


@pytest.mark.parametrize(
    ("definition", "branch"),
    [
        ("%p9_p1 = snop", "!%p7_p3"),
        ("%p9_p1 = scmp.ne.s32.totalorder %s3_s4, 0", "!%p9_p1"),  # the same, computed again
        ("%p9_p1 = pneg %p7_p0", "%p9_p1"),
    ],
)
def test_branches_on_one_condition_agree(tmp_path: Path, definition: str, branch: str) -> None:
    delay = ["| %2 = snop |"] * 4
    first = "%p7_p0 = scmp.ne.s32.totalorder %s3_s9, 0"
    read = listing(
        tmp_path,
        f"| {first}  ;;  %1 = sbr.rel (%p7_p0) target = $region2 |",
        *delay,
        *["| %3 = vadd.f32 %v1, %v1 |"] * 3,  # 5 to 7: when not p7
        f"| {definition}  ;;  %4 = sbr.rel ({branch}) target = $region3 | Start region 2",
        *delay,
        *["| %5 = vmul.f32 %v1, %v1 |"] * 2,  # 13 and 14: when p7
        "| %6 = snop | Start region 3",
    )
    flow = Flow(read, 4, is_squeezed=False)
    root = flow.loops()
    assert flow.way(root, [(1,)] * 16) == [*range(13), 15]
    assert flow.way(root, [(-1,)] * 16) == [*range(5), *range(8, 16)]


@pytest.mark.parametrize(
    ("end", "branch", "passes"),
    [("8", "!%p2_p5", 8), ("%s4", "!%p2_p5", None), ("8", "%p2_p5", None)],
)
def test_passes_up_to_a_constant_are_known(
    tmp_path: Path, end: str, branch: str, passes: int | None
) -> None:
    read = listing(
        tmp_path,
        f"LB | %p2_p5 = scmp.ge.s32.totalorder %s1_s2, {end} /* loop exit test */ | Start region 1",
        f"| %1 = sbr.rel ({branch}) target = $region1 |",
        *["| %2 = snop |"] * 4,
    )
    (loop,) = Flow(read, 4, is_squeezed=False).loops().children
    assert loop.passes == passes


def test_a_loop_without_its_way_back_is_an_error(tmp_path: Path) -> None:
    flow = Flow(listing(tmp_path, "LB | %1 = snop | Start region 1"), 4, is_squeezed=False)
    with pytest.raises(DumpError, match="no branch back to the loop at bundle 0x0"):
        flow.loops()


# --- units -------------------------------------------------------------------------------------


def test_units_are_busy_for_as_long_as_their_operations_hold_them(tmp_path: Path) -> None:
    read = listing(
        tmp_path,
        "| %1 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mrb[0].mxu0 %v1 |",
        "| %1 = vmatmul.mubr.f32.gmra.mrb[4].mxu1 %v1  ;;  %2 = vmatpush3.bf16.msra.mxu1 %v2 |",
        "| %1 = vmatpush3.bf16.xpose.msra.mxu1 %v1  ;;  %2 = vmax.xlane.f32.xlu0 %v3 |",
        "| %v1 = vpop.xlane.xlu0 %1  ;;  %2 = vrot.lane.b32.xlu0 %v3 |",
    )
    assert occupancy(read.bundles, V6E) == Occupancy(
        matmul_cycles=8, push_cycles=8, xlu_cycles=8, matmul_rows=16 + 8
    )
    assert machine_of({"MXU": 2, "VLOAD": 3}, read).chips == ("tpu7x",)


def test_a_shared_left_operand_goes_in_by_halves(tmp_path: Path) -> None:
    whole = listing(tmp_path, "| %1 = vmatmul.bf16.gmra.mxu0 %v1 |")
    halves = listing(tmp_path, *["| %1 = vmatmul.bf16.vlgmr.lmr.mxu0 %v1 |"] * 2)
    assert occupancy(halves.bundles, V6E) == occupancy(whole.bundles, V6E)


# --- whole dumps -------------------------------------------------------------------------------

# A small kernel that streams blocks, its loop: first and last bundle, cycles, pushes' cycles,
# latencies included, optional body.
TINY = {
    "tiny-v6e-jax0.12": (0x0C, 0x80, 117, 32, 913, (110, 123)),
    "tiny-v6e-jax0.10": (0x0C, 0x80, 117, 32, 913, (110, 123)),
    "tiny-tpu7x-jax0.12": (0x06, 0x79, 116, 32, 884, (106, 119)),
    "tiny-v5e-jax0.12": (0x0D, 0x83, 119, 32, 747, (102, 126)),
}
# The decode kernel with 8/2 heads, its steady loop: first and last bundle, cycles, with latencies.
DECODE = {
    "decode-v6e-jax0.12": (0x120, 0x5C8, 1193, 2018),
    "decode-v6e-jax0.10": (0x120, 0x5CF, 1200, 2020),
    "decode-tpu7x-jax0.12": (0x116, 0x5EA, 1237, 2521),
}


@pytest.mark.parametrize("name", DECODE)
def test_the_decode_kernel_is_read(name: str) -> None:
    schedule = read(name)
    assert schedule.name == "paged_decode_attention.1"
    root, filling, steady = schedule.loops
    assert schedule.hot is steady
    assert (steady.first, steady.last, steady.longest.estimate, steady.scheduled) == DECODE[name]
    assert steady.steady == steady.longest  # a step has no branch
    assert steady.all_in.units.push_cycles == 288
    assert steady.num_waits == 36
    assert len(steady.transfers) == 36
    assert {transfer.kind for transfer in steady.transfers} == {
        "hbm_to_smem",
        "hbm_to_vmem",
        "vmem_to_hbm",
    }
    assert filling.all_in.bundles + steady.all_in.bundles < schedule.num_bundles
    assert root.all_in.units.mxu_cycles == 0
    assert schedule.memory["vmem"] == 937984


@pytest.mark.parametrize("name", TINY)
def test_a_dump_is_read_whole(name: str) -> None:
    schedule = read(name)
    first, last, cycles, push_cycles, scheduled, body = TINY[name]
    assert (schedule.name, schedule.kind) == ("tiny_attention.1", "custom-call")
    assert name.split("-")[1] in schedule.machine.chips
    root, loop = schedule.loops
    assert (loop.path, loop.first, loop.last) == ("0.0", first, last)
    assert loop.all_in.cycles == loop.longest.estimate == cycles
    assert loop.all_in.units.push_cycles == push_cycles
    assert loop.scheduled == scheduled
    assert [(found.first, found.last) for found in loop.bodies] == [body]
    assert loop.steady.cycles == cycles - (body[1] - body[0] + 1)
    # The loop fetches the next 64 KiB block and waits for one.
    assert loop.transfers == (Transfer("hbm_to_vmem", 65536, is_predicated=True),)
    assert loop.num_waits == 1
    assert root.all_in.bundles + loop.all_in.bundles == schedule.num_bundles
    assert schedule.hot is loop
    assert schedule.memory["vmem"] > 2 * 65536


def test_a_missing_pass_leaves_its_figures_out(tmp_path: Path) -> None:
    for path in (DUMPS / "tiny-v6e-jax0.12").iterdir():
        if "post-ra" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (files,) = kernel_files(tmp_path)
    schedule = read_schedule(files)
    assert schedule.num_scheduled is None
    assert schedule.loops[1].scheduled is None
    assert schedule.loops[1].all_in.cycles == 117
    assert files.slots is not None
    files.slots.unlink()
    with pytest.raises(DumpError, match="utilisation table is missing"):
        read_schedule(kernel_files(tmp_path)[0])


# --- prediction --------------------------------------------------------------------------------


def test_shares_follow_from_cycles_and_bytes() -> None:
    schedule, chip = read("tiny-v6e-jax0.12"), CHIPS["v6e"]
    facts = WorkFacts(
        block_tokens=128,
        blocks_per_pass=1,
        num_kv_heads=1,
        kv_token_head_bytes=512,
        useful_flops=16 * 128 * 128 * 4,
    )
    figures = predict(schedule, facts, chip)
    hbm = 512 / (1.64e12 / chip.clock_hz)
    assert figures.hbm_cycles == pytest.approx(hbm)
    assert figures.cycles == pytest.approx(103 / 128)  # without the body that runs now and then
    assert figures.all_in_cycles == pytest.approx(117 / 128)
    assert figures.scheduled_cycles == pytest.approx(766 / 128)
    assert figures.roofline_share[256] == pytest.approx(256 * hbm / (2 * 103 + 14))
    assert figures.roofline_share[257] == pytest.approx(257 * hbm / (3 * 103 + 14))
    assert figures.scheduled_share[256] == pytest.approx(256 * hbm / (2 * 766 + 913 - 766))
    assert set(figures.roofline_share) == set(CONTEXTS)
    assert figures.useful_flop_share == pytest.approx(16 * 128 * 128 * 4 / (524288 * 103))
    assert figures.prologue_us == pytest.approx(12 / chip.clock_hz * 1e6)
    assert figures.code_bytes == 157 * 85


def test_several_blocks_per_pass_share_its_cost() -> None:
    schedule, chip = read("tiny-v6e-jax0.12"), CHIPS["v6e"]
    facts = WorkFacts(64, 2, 4, 512, 1)
    figures = predict(schedule, facts, chip)
    assert figures.cycles == pytest.approx(103 / 512)
    needed = 130 * 4 * figures.hbm_cycles
    assert figures.roofline_share[130] == min(1.0, needed / ((3 * 103 + 14) / 2))


def test_passes_of_inner_loops_count() -> None:
    schedule, chip = read("tiny-v6e-jax0.12"), CHIPS["v6e"]
    facts = WorkFacts(128, 1, 1, 512, 1, inner_passes=(3,))  # as if the whole kernel were a pass
    outside = schedule.loops[0].steady.estimate
    assert predict(schedule, facts, chip).cycles == pytest.approx((outside + 3 * 103) / 128)


def test_a_step_counts_loops_beside_the_steady_one_once_per_item() -> None:
    """An item: 12 cycles around, 10 passes of a loop of 3. Its steady loop, 103 cycles and 14 more
    where masked, has a loop of 5 in an optional body, 4 passes."""
    schedule, chip = read("tiny-v6e-jax0.12"), CHIPS["v6e"]
    root, steady = schedule.loops

    def small(path: str, cycles: int, passes: int, *, is_on_steady_way: bool) -> LoopReport:
        cost = Cost(cycles, cycles, Occupancy(0, 0, 0, 0))
        same: dict[str, Any] = dict.fromkeys(("all_in", "steady", "longest"), cost)
        later: dict[str, Any] = dict.fromkeys(("scheduled", "scheduled_steady"), cycles)
        return replace(
            root, path=path, passes=passes, is_on_steady_way=is_on_steady_way, **same, **later
        )

    around = small("0.0", 12, 1, is_on_steady_way=True)
    beside = small("0.0.1", 3, 10, is_on_steady_way=True)
    optional = small("0.0.0.0", 5, 4, is_on_steady_way=False)
    nest = (root, around, replace(steady, path="0.0.0"), optional, beside)
    facts = WorkFacts(128, 1, 1, 512, 1)
    step = StepFacts(items=2, blocks=7, masked_blocks=3, useful_flops=524288, hbm_bytes=0)
    found = predict_step(replace(schedule, loops=nest), facts, step, chip)
    assert found["final"].cycles == 2 * (12 + 10 * 3 + 4 * 5) + 7 * 103 + 3 * 117
    assert found["final"].useful_flop_share == pytest.approx(1 / found["final"].cycles, rel=1e-3)
    assert found["scheduled"].cycles == 2 * (12 + 10 * 3 + 4 * 5) + 7 * 766 + 3 * 913


def test_facts_that_lead_above_the_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="only 1 loops lead to its hot one"):
        predict(read("tiny-v6e-jax0.12"), WorkFacts(1, 1, 1, 1, 1, (2, 2)), CHIPS["v6e"])
