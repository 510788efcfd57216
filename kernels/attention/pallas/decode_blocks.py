"""Block sizes of the decode kernel: what they are, what they cost, which ones fit a chip.

Owns `DecodeBlocks`, the shapes that follow from it (`DecodeShape`), and the exact VMEM and SMEM
estimates. Knows nothing of how the kernel computes. Loads no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.attention.geometry import Geometry, Scoring
from kernels.chips import LANES, SUBLANES, Chip

ITEMSIZE = {"float32": 4, "int32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
WORD_BYTES = 4  # a vector register holds 32-bit words; narrower types share a word between rows
MAX_DECODE_QUERIES = 8  # a verify step's rows touch at most two write tiles of 8 rows or more

FILL_STEPS = 3  # a slot is being written, scored and accumulated in three consecutive steps
MIN_SLOTS = 6  # those three, and at least two being fetched; even, for stages alternate buffers
MAX_SLOTS = 8  # the loop is unrolled over them: more is more code
RECORD_WORDS = 10  # scalars kept per item
NUM_PENDING = 3  # scalars kept per step
NUM_MARKS = 3  # scalars kept per item in vector memory, one register row each
# What the compiler itself may add to the kernel's scratch: spills and semaphores.
VMEM_RESERVE = 2 << 20


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """How the decode kernel cuts its work.

    Attributes:
        block_tokens: KV positions of one item, whole pages.
        num_slots: steps whose items are in VMEM at once.
        items_per_step: items worked on together; more hide latency where KV heads are few.
        heads_per_tile: KV heads whose query rows share one dense tile of scores.
        decode_queries: new tokens per sequence the call accepts (more than 1: verify steps).
        widen_float8: float8 goes to the matrix unit as bfloat16, for those that take no 8 bits.
    """

    block_tokens: int = 256
    num_slots: int = 8
    items_per_step: int = 1
    heads_per_tile: int = 1
    decode_queries: int = 1
    widen_float8: bool = False


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Every static size the kernel uses, derived once from geometry, scoring and blocks."""

    geometry: Geometry
    scoring: Scoring
    blocks: DecodeBlocks

    @property
    def pages(self) -> int:
        """Pages of an item."""
        return self.blocks.block_tokens // self.geometry.page_size

    @property
    def num_rings(self) -> int:
        """Items in VMEM at once: one scratch array each."""
        return self.blocks.num_slots * self.blocks.items_per_step

    def grouped(self, rows: int, width: int, dtype: str) -> tuple[int, ...]:
        """The shape of rows that are transferred: `[rows, width]`, or rows in groups of 8.

        16-bit values have tiles of 8 rows in HBM, and may have tiles of 16 in VMEM; with several
        tiles side by side their order would differ, and each transfer would be a slow strided one.
        Rows in groups of 8 lie the same way in both. In HBM nothing moves: narrower values would.
        """
        if ITEMSIZE[dtype] != 2 or width == LANES or rows % SUBLANES:
            return (rows, width)
        return (rows // SUBLANES, SUBLANES, width)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """One plane of a page, as the kernel takes the cache."""
        geometry = self.geometry
        return self.grouped(geometry.page_size, geometry.key_width, geometry.kv_dtype)

    @property
    def group_bits(self) -> int:
        """A shift by this turns a position into an index of `page_shape`."""
        return 0 if len(self.page_shape) == 2 else SUBLANES.bit_length() - 1

    @property
    def page_bits(self) -> int:
        """Page sizes are powers of two: a shift by this divides a position by one."""
        return self.geometry.page_size.bit_length() - 1

    @property
    def line_bits(self) -> int:
        """As `page_bits`, of the positions whose page ids are one line (128 of them)."""
        return self.page_bits + LANES.bit_length() - 1

    @property
    def rows_per_head(self) -> int:
        """Query rows of one KV head in a tile: (new token, query head of the group)."""
        return self.geometry.group * self.blocks.decode_queries

    @property
    def tile_rows(self) -> int:
        """Rows of a tile of scores, padded to whole registers."""
        used = self.blocks.heads_per_tile * self.rows_per_head
        return -(-used // SUBLANES) * SUBLANES

    @property
    def num_tiles(self) -> int:
        return self.geometry.num_kv_heads // self.blocks.heads_per_tile

    @property
    def num_rows(self) -> int:
        """Query rows of one item, padding included."""
        return self.num_tiles * self.tile_rows

    @property
    def packing(self) -> int:
        """Cache rows that share a 32-bit word."""
        return WORD_BYTES // ITEMSIZE[self.geometry.kv_dtype]

    @property
    def write_rows(self) -> int:
        """Positions of the smallest piece of a page that can be written: one packed tile."""
        return min(self.geometry.page_size, SUBLANES * self.packing)

    @property
    def new_rows(self) -> int:
        """Rows of new K and V of one sequence."""
        planes = self.geometry.num_planes * self.geometry.num_kv_heads
        return planes * self.blocks.decode_queries

    @property
    def token_rows(self) -> tuple[tuple[int, str], ...]:
        """Rows and dtype of what a sequence brings: queries, then new K/V.

        Of one dtype they are one array, and so one transfer. Whole tiles of the query dtype, or
        the transfer would be strided.
        """
        geometry = self.geometry
        if geometry.q_dtype != geometry.kv_dtype:
            return (self.num_rows, geometry.q_dtype), (self.new_rows, "int32")
        tile = SUBLANES * self.packing
        rows = self.num_rows + self.new_rows
        return ((-(-rows // tile) * tile, geometry.q_dtype),)

    @property
    def out_dtype(self) -> str:
        """float32 where the rows would not fill tiles of the query dtype."""
        tile = SUBLANES * WORD_BYTES // ITEMSIZE[self.geometry.q_dtype]
        return "float32" if self.num_rows % tile else self.geometry.q_dtype

    @property
    def native_float8(self) -> bool:
        is_float8 = self.geometry.kv_dtype == "float8_e4m3fn" and self.compute_dtype == "bfloat16"
        return is_float8 and not self.blocks.widen_float8

    @property
    def compute_dtype(self) -> str:
        """What the matrix unit multiplies: exact for the widest of query and cache."""
        wide = "float32" in (self.geometry.q_dtype, self.geometry.kv_dtype)
        return "float32" if wide else "bfloat16"


def _padded(rows: int, width: int, itemsize: int) -> int:
    """Bytes of a `[rows, width]` array in VMEM, where a tile has 8 rows of 32-bit words."""
    packed = SUBLANES * WORD_BYTES // itemsize
    small = min(packed, 1 << max(rows - 1, 0).bit_length())  # few rows take a smaller tile
    small = max(small, WORD_BYTES // itemsize)
    return -(-rows // small) * small * -(-width // LANES) * LANES * itemsize


def vmem_bytes(geometry: Geometry, scoring: Scoring, blocks: DecodeBlocks) -> int:
    """VMEM of the kernel's scratch arrays and operands."""
    shape = DecodeShape(geometry, scoring, blocks)
    kv = ITEMSIZE[geometry.kv_dtype]
    planes = shape.pages * geometry.num_planes * geometry.num_kv_heads
    item = planes * _padded(geometry.page_size, geometry.key_width, kv)
    for rows, dtype in shape.token_rows:
        item += _padded(rows, geometry.key_width, ITEMSIZE[dtype])
    item += _padded(shape.num_rows, geometry.value_width, ITEMSIZE[shape.out_dtype])
    item += SUBLANES * LANES * WORD_BYTES  # marks
    stage = _padded(shape.num_rows, blocks.block_tokens, WORD_BYTES)
    stage += _padded(shape.num_rows, blocks.block_tokens, ITEMSIZE[shape.compute_dtype])
    stage += 2 * _padded(shape.num_rows, LANES, WORD_BYTES)
    running = _padded(shape.num_rows, geometry.value_width, WORD_BYTES)
    running += 2 * _padded(shape.num_rows, LANES, WORD_BYTES)
    sinks = _padded(shape.num_rows, LANES, WORD_BYTES) if scoring.has_sinks else 0
    return shape.num_rings * item + 2 * blocks.items_per_step * stage + running + sinks


def smem_bytes(geometry: Geometry, scoring: Scoring, blocks: DecodeBlocks, *, num_rows: int) -> int:
    """SMEM for a step of `num_rows` sequences: their lengths, item records and page ids."""
    shape = DecodeShape(geometry, scoring, blocks)
    per_seq = 4 + (blocks.decode_queries if scoring.has_tree else 0)
    ring = shape.num_rings * (RECORD_WORDS + LANES)
    return WORD_BYTES * (8 + per_seq * (num_rows + 1) + ring + NUM_PENDING * blocks.num_slots)


def heads_per_tile(geometry: Geometry, chip: Chip, decode_queries: int) -> int:
    """KV heads that share a tile: fill 8 rows, and both halves of a 256-wide matrix unit."""
    wanted = max(1, SUBLANES // (geometry.group * decode_queries))
    if chip.mxu_side > geometry.key_width:
        wanted = max(wanted, chip.mxu_side // geometry.key_width)
    return max(n for n in range(1, wanted + 1) if geometry.num_kv_heads % n == 0)


def _takes_8_bits(chip: Chip) -> bool:
    """Whether its matrix unit does; where that is int8 alone, the compiler widens float8 itself."""
    return chip.has_int8 or chip.has_fp8


def candidate_blocks(
    geometry: Geometry, scoring: Scoring, chip: Chip, *, decode_queries: int = 1
) -> list[DecodeBlocks]:
    """Every choice worth compiling that fits the chip, the most promising first."""
    together = heads_per_tile(geometry, chip, decode_queries)
    widened = geometry.kv_dtype.startswith("float8") and not _takes_8_bits(chip)
    # Enough heads in flight per step to hide latency: eight planes of 128 lanes, and twice as many
    # where a matrix unit twice as wide is done with them in half the time.
    lanes = 8 * chip.mxu_side
    wanted = -(-lanes // (geometry.num_kv_heads * geometry.key_width))
    items = min(4, 1 << (wanted - 1).bit_length())
    page = geometry.page_size
    tokens = max(page, 256)
    found: list[DecodeBlocks] = []
    for per_step in dict.fromkeys((items, max(1, items // 2), items * 2)):
        for size in dict.fromkeys((tokens, max(page, tokens // 2), 2 * tokens)):
            # Several items per step are much code, and as many bytes with fewer slots.
            most = MAX_SLOTS if per_step == 1 else MIN_SLOTS
            for slots in range(most, MIN_SLOTS - 1, -2):
                found.append(DecodeBlocks(size, slots, per_step, together, decode_queries, widened))
    return [b for b in found if vmem_bytes(geometry, scoring, b) + VMEM_RESERVE <= chip.vmem_bytes]


def default_blocks(
    geometry: Geometry, scoring: Scoring, chip: Chip, *, decode_queries: int = 1
) -> DecodeBlocks:
    """The heuristic's choice: the first candidate that fits."""
    found = candidate_blocks(geometry, scoring, chip, decode_queries=decode_queries)
    if not found:
        raise ValueError(f"no decode block of {geometry} fits the VMEM of {chip.name}")
    return found[0]


def check_geometry(geometry: Geometry, blocks: DecodeBlocks) -> None:
    """Refuses shapes the kernel can't cut; each message names both sides."""
    page, width = geometry.page_size, geometry.key_width
    if geometry.num_q_heads % geometry.num_kv_heads:
        raise ValueError(
            f"{geometry.num_q_heads} query heads can't share {geometry.num_kv_heads} KV heads"
        )
    if width % LANES or geometry.value_width % LANES:
        raise ValueError(f"head widths must be multiples of {LANES}, got {width}")
    if page & (page - 1) or page < 2 * SUBLANES:
        raise ValueError(f"page_size must be a power of two of at least 16, got {page}")
    if blocks.block_tokens % page or LANES % max(1, blocks.block_tokens // page):
        raise ValueError(
            f"block_tokens {blocks.block_tokens} must be 1 to {LANES} whole pages of {page}, "
            "a power of two"
        )
    if geometry.num_kv_heads % blocks.heads_per_tile:
        raise ValueError(
            f"heads_per_tile {blocks.heads_per_tile} must divide {geometry.num_kv_heads} KV heads"
        )
    if not 1 <= blocks.decode_queries <= MAX_DECODE_QUERIES:
        raise ValueError(
            f"decode_queries must be 1 to {MAX_DECODE_QUERIES}, got {blocks.decode_queries}"
        )
    if blocks.num_slots < MIN_SLOTS or blocks.num_slots % 2:
        raise ValueError(f"num_slots must be even and at least {MIN_SLOTS}, got {blocks.num_slots}")


def check_blocks(geometry: Geometry, scoring: Scoring, blocks: DecodeBlocks, chip: Chip) -> None:
    """Refuses blocks that don't fit the chip; the message proposes some that do."""
    check_geometry(geometry, blocks)
    if DecodeShape(geometry, scoring, blocks).native_float8 and not _takes_8_bits(chip):
        raise ValueError(f"{chip.name} multiplies no float8: its blocks need widen_float8=True")
    needed = vmem_bytes(geometry, scoring, blocks) + VMEM_RESERVE
    if needed <= chip.vmem_bytes:
        return
    queries = blocks.decode_queries
    fitting = candidate_blocks(geometry, scoring, chip, decode_queries=queries)
    smaller = [replace(b, decode_queries=queries) for b in fitting[:1]]
    raise ValueError(
        f"{blocks} needs {needed} bytes of VMEM, {needed - chip.vmem_bytes} more than {chip.name} "
        f"has; {'a choice that fits: ' + str(smaller[0]) if smaller else 'no choice fits'}"
    )
