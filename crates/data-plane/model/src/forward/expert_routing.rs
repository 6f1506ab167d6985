//! Routing of a batch's rows to experts, with weights.
//!
//! Rows are sorted by expert without padding, and an expert without rows is not evaluated. Experts follow in
//! order of their numbers, and the rows of an expert keep their order. A row's sum thus follows the numbers
//! of the row's experts, as in transformers, and does not depend on other rows or threads.

use std::ops::Range;

use crate::shape::experts::{ExpertId, Experts};

/// Routing of one batch; the buffers are kept between passes.
#[derive(Debug, Default)]
pub struct Routing {
    count: usize,
    /// Rows, sorted by expert.
    rows: Vec<u32>,
    /// Weight of the expert for each row.
    weights: Vec<f32>,
    /// Experts with rows, ascending, and their ranges in `rows`.
    taken: Vec<(ExpertId, Range<usize>)>,
    choices: Vec<ExpertChoice>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct ExpertChoice {
    expert: ExpertId,
    weight: f32,
    row: u32,
}

/// Rows of one expert in a batch.
#[derive(Debug, Clone, Copy)]
pub struct ExpertRows<'a> {
    /// Number of the expert.
    pub expert: ExpertId,
    /// Rows of the expert, ascending.
    pub rows: &'a [u32],
    /// Weight of the expert for each row.
    pub weights: &'a [f32],
}

impl Routing {
    /// Sorts rows by expert from their `probabilities`, `[rows, experts]`.
    pub(crate) fn sort(&mut self, probabilities: &[f32], experts: &Experts) {
        self.choices.clear();
        self.count = probabilities.len() / experts.count;
        for (row, probabilities) in (0..).zip(probabilities.chunks_exact(experts.count)) {
            choose(row, probabilities, experts, &mut self.choices);
        }
        self.choices.sort_unstable_by_key(|choice| (choice.expert, choice.row));
        self.rows.clear();
        self.rows.extend(self.choices.iter().map(|choice| choice.row));
        self.weights.clear();
        self.weights.extend(self.choices.iter().map(|choice| choice.weight));
        self.taken.clear();
        let mut first = 0;
        for of_expert in self.choices.chunk_by(|one, other| one.expert == other.expert) {
            let behind = first + of_expert.len();
            self.taken.push((of_expert[0].expert, first..behind));
            first = behind;
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.count
    }

    pub(crate) fn experts(&self) -> usize {
        self.taken.len()
    }

    pub(crate) fn taken(&self, nth: usize) -> ExpertRows<'_> {
        let (expert, own) = &self.taken[nth];
        ExpertRows { expert: *expert, rows: &self.rows[own.clone()], weights: &self.weights[own.clone()] }
    }
}

/// Appends a row's most probable experts; of equal ones the first.
fn choose(row: u32, probabilities: &[f32], experts: &Experts, choices: &mut Vec<ExpertChoice>) {
    let first = choices.len();
    for _ in 0..experts.chosen {
        let is_free = |expert: &ExpertId| choices[first..].iter().all(|choice| choice.expert != *expert);
        let of = |expert: ExpertId| probabilities[usize::from(expert.0)];
        // A NaN is never greater, so a row of NaN chooses its first experts.
        let better = |best: ExpertId, other: ExpertId| if of(other) > of(best) { other } else { best };
        let Some(expert) = experts.ids().filter(is_free).reduce(better) else { break };
        choices.push(ExpertChoice { expert, weight: of(expert), row });
    }
    if experts.normalized {
        let chosen = &mut choices[first..];
        // The sum adds the most probable expert first.
        let sum: f32 = chosen.iter().map(|choice| choice.weight).sum();
        chosen.iter_mut().for_each(|choice| choice.weight /= sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(chosen: usize, normalized: bool) -> Experts {
        Experts { count: 4, chosen, width: 1, normalized, dense_layers: Vec::new() }
    }

    fn sorted(probabilities: &[f32], experts: &Experts) -> Vec<(u16, Vec<u32>, Vec<f32>)> {
        let mut routing = Routing::default();
        // The first sort leaves contents that the second must clear.
        routing.sort(&[0.7, 0.1, 0.1, 0.1].repeat(5), experts);
        routing.sort(probabilities, experts);
        let taken = |nth| {
            let ExpertRows { expert, rows, weights } = routing.taken(nth);
            (expert.0, rows.to_vec(), weights.to_vec())
        };
        (0..routing.experts()).map(taken).collect()
    }

    #[test]
    fn rows_are_sorted_by_expert_and_keep_their_order_there() {
        let probabilities = [0.1, 0.2, 0.3, 0.4, 0.5, 0.2, 0.2, 0.1, 0.25, 0.05, 0.1, 0.6];
        let expected = vec![
            (0, vec![1, 2], vec![0.5, 0.25]),
            (1, vec![1], vec![0.2]),
            (2, vec![0], vec![0.3]),
            (3, vec![0, 2], vec![0.4, 0.6]),
        ];
        assert_eq!(sorted(&probabilities, &experts(2, false)), expected);
    }

    #[test]
    fn of_equals_the_first_is_taken() {
        let taken = sorted(&[0.25; 4], &experts(2, false));
        assert_eq!(taken, [(0, vec![0], vec![0.25]), (1, vec![0], vec![0.25])]);
        let taken = sorted(&[0.1, 0.4, 0.1, 0.4], &experts(1, false));
        assert_eq!(taken, [(1, vec![0], vec![0.4])]);
    }

    #[test]
    fn weights_add_up_to_one_where_the_model_says_so() {
        let taken = sorted(&[0.125, 0.5, 0.25, 0.125], &experts(2, true));
        assert_eq!(taken, [(1, vec![0], vec![0.5 / 0.75]), (2, vec![0], vec![0.25 / 0.75])]);
    }

    #[test]
    fn a_row_without_numbers_takes_as_many_experts_as_any() {
        let taken = sorted(&[f32::NAN; 4], &experts(3, true));
        assert_eq!(taken.iter().map(|(expert, ..)| *expert).collect::<Vec<_>>(), [0, 1, 2]);
    }
}
