//! A delta has the same bits for any split of its ranks between threads and memories.

use std::{sync::Arc, thread};

use kernels::{
    ActivationForms, Activations, Isa,
    blocks::{BlockLease, BlockMemory},
    lora::{
        Factor, LeadingSegment, LeadingSums, LoraMatrix, LoraPrecision, LoraSegment, MatrixLayout,
        PIECE_ALIGNMENT, Packing, PieceTable, RANK_BLOCK, SharedBytes, StagedMatrix, add_deltas, sum_heads,
        sum_ranks,
    },
    reference,
};

use crate::support::{activations, bits, floats, lora_matrix, norm, pool, random};

/// Every pair of kinds of A and B.
const KINDS: [[LoraPrecision; 2]; 9] = {
    use LoraPrecision::{Bf16, Compact, Exact};
    [
        [Exact, Exact],
        [Exact, Compact],
        [Exact, Bf16],
        [Compact, Exact],
        [Compact, Compact],
        [Compact, Bf16],
        [Bf16, Exact],
        [Bf16, Compact],
        [Bf16, Bf16],
    ]
};

/// A matrix with factors of different precision: A of one image and B of another.
fn mixed(rank: usize, columns: usize, rows: usize, kinds: [LoraPrecision; 2]) -> LoraMatrix {
    let random = &mut random((rank * 1000 + columns) as u64);
    let (a, b) = (floats(random, rank * columns), floats(random, rows * rank));
    let mut bytes = Vec::new();
    let [first, second] =
        kinds.map(|kind| MatrixLayout::append(&mut bytes, rank, columns, rows, 0.5, &a, &b, kind));
    let bytes: SharedBytes = Arc::new(bytes);
    LoraMatrix::over(&bytes, MatrixLayout { a: first.a, ..second }).expect("a layout of these bytes")
}

/// A matrix, input rows, and the bits of the delta computed in one piece.
struct HandoverCase {
    isa: Isa,
    matrix: LoraMatrix,
    rows: usize,
    x: Activations,
    before: Vec<f32>,
    wanted: Vec<u32>,
    what: String,
}

/// Size of blocks that hold a whole rank block of every matrix here, and the smallest that hold any piece.
const BLOCK_BYTES: [usize; 2] = [1 << 16, 4096];

/// An empty copy of `matrix`, at alternating ends of a pool.
fn staged(matrix: &LoraMatrix, block_bytes: usize) -> (StagedMatrix, Arc<BlockLease>) {
    let mut packing = Packing::new(block_bytes);
    let places = PieceTable::pack(matrix.layout(), &mut packing).expect("the least piece fits");
    let blocks = packing.blocks();
    let memory = BlockMemory::new(block_bytes, 3 * blocks as usize).expect("memory for a copy");
    let scattered = |block: u32| if block.is_multiple_of(2) { block } else { 3 * blocks - block };
    let loan = memory.lease(&(0..blocks).map(scattered).collect::<Vec<_>>());
    (StagedMatrix::new(&loan, matrix, &places), loan)
}

impl HandoverCase {
    fn new(
        isa: Isa,
        rank: usize,
        columns: usize,
        outputs: usize,
        rows: usize,
        kinds: [LoraPrecision; 2],
    ) -> Self {
        let matrix = mixed(rank, columns, outputs, kinds);
        let values = floats(&mut random(3), rows * columns);
        let x = activations(&mut pool(1), isa, &values, rows, ActivationForms::default());
        let before = floats(&mut random(4), rows * outputs);
        let what = format!("{isa:?}, {kinds:?}, rank {rank}, {columns} to {outputs}, {rows} rows");
        let mut case = Self { isa, matrix, rows, x, before, wanted: Vec::new(), what };
        case.wanted = case.add(None, LeadingSums::None);
        case
    }

    fn add(&self, staged: Option<&StagedMatrix>, head: LeadingSums<'_>) -> Vec<u32> {
        let mut out = self.before.clone();
        let segment =
            LoraSegment { first_row: 0, rows: self.rows, matrix: &self.matrix, column: 0, staged, head };
        add_deltas(&mut pool(1), self.isa, &self.x, &[segment], &mut out, self.matrix.rows());
        bits(&out)
    }

    fn sum_ranks(&self, ranks: usize) -> Vec<f32> {
        let mut sums = vec![f32::NAN; self.before.len()];
        sum_ranks(self.isa, self.x.values(), &self.matrix, 0..ranks, &mut sums);
        sums
    }

    fn sum_heads(&self, ranks: usize) -> Vec<f32> {
        let mut sums = vec![f32::NAN; self.before.len() + 3];
        let segment =
            LeadingSegment { first_row: 0, rows: self.rows, matrix: &self.matrix, ranks, offset: 3 };
        sum_heads(&mut pool(1), self.isa, &self.x, &[segment], &mut sums);
        assert!(
            sums[..3].iter().all(|x| x.is_nan()),
            "{}: what lies before the offset is untouched",
            self.what
        );
        sums.split_off(3)
    }

    /// Checks heads of every length, with the rest in host memory and, once it arrives, on the device.
    fn check_every_split(&self) {
        self.check_every_split_in(BLOCK_BYTES[0]);
    }

    fn check_every_split_in(&self, block_bytes: usize) {
        let (staged, _loan) = staged(&self.matrix, block_bytes);
        for ranks in (0..=self.matrix.rank()).rev() {
            while staged.first_rank() > ranks {
                staged.copy_next(&self.matrix);
            }
            let sums = self.sum_ranks(ranks);
            assert_eq!(bits(&self.sum_heads(ranks)), bits(&sums), "{}, head {ranks}", self.what);
            let head = LeadingSums::Sums { ranks, values: &sums };
            assert_eq!(self.add(None, head), self.wanted, "{}, head {ranks}", self.what);
            assert_eq!(self.add(Some(&staged), head), self.wanted, "{}, staged from {ranks}", self.what);
        }
        assert_eq!(self.add(Some(&staged), LeadingSums::None), self.wanted, "{}, all staged", self.what);
    }
}

#[test]
fn a_delta_has_the_same_bits_wherever_its_ranks_are_split() {
    for isa in Isa::available() {
        for kinds in KINDS {
            for rank in 1..=40 {
                HandoverCase::new(isa, rank, 77, 33, 3, kinds).check_every_split();
            }
        }
    }
}

#[test]
fn splits_keep_the_bits_for_any_number_of_rows() {
    for isa in Isa::available() {
        for kinds in KINDS {
            for rows in (1..=40).step_by(3) {
                HandoverCase::new(isa, 37, 45, 21, rows, kinds).check_every_split();
            }
        }
    }
}

#[test]
fn splits_keep_the_bits_for_any_width() {
    for isa in Isa::available() {
        for kinds in KINDS {
            for (columns, outputs) in [(1, 1), (3, 17), (64, 16), (255, 65), (256, 80), (321, 1), (600, 131)]
            {
                for rank in [1, 8, 16, 37] {
                    HandoverCase::new(isa, rank, columns, outputs, 2, kinds).check_every_split();
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_bits_alone_that_it_has_among_others_for_every_kind() {
    for isa in Isa::available() {
        for kinds in KINDS {
            for rank in [5, 16, 37, 80] {
                let all = HandoverCase::new(isa, rank, 345, 150, 40, kinds);
                for row in 0..all.rows {
                    let x = &all.x.values()[row * 345..][..345];
                    let mut sums = [0.0; 150];
                    sum_ranks(isa, x, &all.matrix, 0..rank, &mut sums);
                    let before = &all.before[row * 150..];
                    let alone: Vec<f32> = sums.iter().zip(before).map(|(sum, before)| before + sum).collect();
                    assert_eq!(bits(&alone), all.wanted[row * 150..][..150], "{}, row {row}", all.what);
                }
            }
        }
    }
}

#[test]
fn sums_of_ranks_are_the_plain_product_of_those_ranks() {
    let (rank, columns, outputs) = (37, 333, 70);
    let random = &mut random(9);
    let (a, b, x) = (floats(random, rank * columns), floats(random, outputs * rank), floats(random, columns));
    for (precision, tolerance) in
        [(LoraPrecision::Exact, 1e-6), (LoraPrecision::Compact, 1e-3), (LoraPrecision::Bf16, 1e-2)]
    {
        let matrix = lora_matrix(rank, columns, outputs, 0.5, &a, &b, precision);
        for isa in Isa::available() {
            for ranks in [0..0, 0..1, 0..16, 3..20, 16..32, 17..37, 36..37, 0..37] {
                let mut sums = vec![f32::NAN; outputs];
                sum_ranks(isa, &x, &matrix, ranks.clone(), &mut sums);
                let part: Vec<f32> = b.chunks(rank).flat_map(|row| row[ranks.clone()].to_vec()).collect();
                let a = &a[ranks.start * columns..ranks.end * columns];
                let wanted = if ranks.is_empty() {
                    vec![0.0; outputs]
                } else {
                    reference::lora(&x, a, &part, ranks.len(), 0.5)
                };
                let allowed = tolerance * norm(&x) * norm(a) * norm(&part);
                for (got, wanted) in sums.iter().zip(wanted) {
                    let off = f64::from((got - wanted).abs());
                    assert!(off <= allowed, "{isa:?}, {precision:?}, {ranks:?}: {got}, not {wanted}");
                }
            }
        }
    }
}

#[test]
fn how_a_factor_is_cut_changes_no_bit() {
    for isa in Isa::available() {
        for kinds in KINDS {
            for (rank, rows) in [(5, 3), (16, 1), (70, 9), (100, 40)] {
                let case = HandoverCase::new(isa, rank, 345, 300, rows, kinds);
                let mut packing = Packing::new(BLOCK_BYTES[1]);
                let places = PieceTable::pack(case.matrix.layout(), &mut packing).unwrap();
                let pieces = [Factor::A, Factor::B].map(|factor| places.cut(factor).count);
                assert!(rank < 16 || pieces.iter().all(|&count| count > 1), "{pieces:?}");
                case.check_every_split_in(BLOCK_BYTES[1]);
            }
        }
    }
}

#[test]
fn pieces_lie_apart_and_within_blocks_that_are_well_filled() {
    for block_bytes in [4096, 8192, 1 << 16, 368_640] {
        // As many sizes as an adapter's pieces have.
        let sizes = [2048, 1000, 4096, 1536, 72];
        let (mut packing, mut taken, mut bytes) = (Packing::new(block_bytes), Vec::new(), 0);
        for index in 0..2000_usize {
            let size = sizes[index * index % 7 % sizes.len()];
            let place = packing.place(size).expect("it fits");
            taken.push((place.block, place.offset as usize, size));
            bytes += size;
        }
        taken.sort_unstable();
        let within = |&(block, offset, size): &(u32, usize, usize)| {
            block < packing.blocks() && offset.is_multiple_of(PIECE_ALIGNMENT) && offset + size <= block_bytes
        };
        assert!(taken.iter().all(within));
        let apart =
            |pair: &[(u32, usize, usize)]| pair[0].0 < pair[1].0 || pair[0].1 + pair[0].2 <= pair[1].1;
        assert!(taken.windows(2).all(apart));
        let blocks = packing.blocks() as usize;
        assert!(
            blocks * block_bytes < bytes + bytes / 3 + 2 * block_bytes,
            "{blocks} of {block_bytes} for {bytes}"
        );
    }
    assert_eq!(Packing::new(4096).place(4097), None);
    assert_eq!(Packing::new(100).place(1), None, "pieces would not be aligned");
}

#[test]
fn what_was_given_up_is_not_written_to_any_more() {
    let case = HandoverCase::new(Isa::best(), 40, 20, 10, 1, [LoraPrecision::Exact; 2]);
    let (staged, loan) = staged(&case.matrix, BLOCK_BYTES[0]);
    assert!(staged.copy_next(&case.matrix) > 0);
    loan.end();
    assert_eq!(staged.copy_next(&case.matrix), 0);
    let panic = thread::scope(|scope| scope.spawn(|| case.add(Some(&staged), LeadingSums::None)).join());
    assert!(panic.is_err(), "nothing is computed with it");
}

#[test]
fn rank_blocks_arrive_from_the_last_to_the_first_and_each_once() {
    for kinds in KINDS {
        let matrix = mixed(37, 45, 21, kinds);
        let (staged, _loan) = staged(&matrix, BLOCK_BYTES[0]);
        assert_eq!(staged.first_rank(), 37);
        let mut copied = 0;
        for first in [2 * RANK_BLOCK, RANK_BLOCK, 0] {
            let announced = staged.next_bytes().unwrap();
            assert_eq!(staged.copy_next(&matrix), announced);
            assert_eq!(staged.first_rank(), first);
            copied += announced;
        }
        assert_eq!(copied, matrix.bytes());
        assert_eq!((staged.next_bytes(), staged.copy_next(&matrix)), (None, 0));
    }
}

#[test]
fn deltas_keep_their_bits_while_the_matrix_arrives() {
    let case = HandoverCase::new(Isa::best(), 200, 345, 150, 5, [LoraPrecision::Exact; 2]);
    let sums: Vec<_> = (0..=200).map(|ranks| case.sum_ranks(ranks)).collect();
    for _ in 0..20 {
        let (staged, _loan) = staged(&case.matrix, BLOCK_BYTES[0]);
        thread::scope(|scope| {
            scope.spawn(|| while staged.copy_next(&case.matrix) > 0 {});
            loop {
                let ranks = staged.first_rank();
                let head = LeadingSums::Sums { ranks, values: &sums[ranks] };
                assert_eq!(case.add(Some(&staged), head), case.wanted, "from rank {ranks} on");
                if ranks == 0 {
                    break;
                }
            }
        });
    }
}

#[test]
#[should_panic(expected = "the staged copy has the ranks that no head covers")]
fn a_rank_that_neither_the_head_nor_the_device_has_is_refused() {
    let case = HandoverCase::new(Isa::best(), 40, 20, 10, 1, [LoraPrecision::Exact; 2]);
    let (staged, _loan) = staged(&case.matrix, BLOCK_BYTES[0]);
    staged.copy_next(&case.matrix);
    let sums = case.sum_ranks(31);
    case.add(Some(&staged), LeadingSums::Sums { ranks: 31, values: &sums });
}

#[test]
#[should_panic(expected = "the staged copy is of this matrix")]
fn another_matrixs_copy_is_refused() {
    let case = HandoverCase::new(Isa::best(), 8, 20, 10, 1, [LoraPrecision::Exact; 2]);
    let other = mixed(8, 20, 11, [LoraPrecision::Exact; 2]);
    case.add(Some(&staged(&other, BLOCK_BYTES[0]).0), LeadingSums::None);
}

#[test]
#[should_panic(expected = "a head has a sum for each output")]
fn a_head_of_another_shape_is_refused() {
    let case = HandoverCase::new(Isa::best(), 8, 20, 10, 1, [LoraPrecision::Exact; 2]);
    case.add(None, LeadingSums::Sums { ranks: 3, values: &[0.0; 9] });
}
