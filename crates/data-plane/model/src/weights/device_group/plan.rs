//! Division of a model's weights among the devices of a group.

use std::ops::Range;

use kernels::PackedLayout;
use shmproto::group::WeightSplit;

use crate::{
    linear_sites::{Site, SiteId},
    shape::config::ModelConfig,
};

/// Division of a model's weights among the devices of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupPlan {
    /// Number of devices, the leader's included.
    pub devices: usize,
    /// Way of dividing the weights.
    pub split: WeightSplit,
}

impl GroupPlan {
    /// Returns the outputs of `site` that each device holds. The ranges follow each other and cover all
    /// outputs of the site's linear layers, side by side.
    pub(super) fn ranges(&self, config: &ModelConfig, id: SiteId, site: &Site) -> Vec<Range<usize>> {
        let rows: Vec<usize> = site.parts.iter().map(|part| part.rows).collect();
        let outputs = rows.iter().sum();
        let cuts: Vec<usize> = match self.split {
            WeightSplit::Outputs => {
                (0..=self.devices).map(|device| cut(&rows, outputs * device / self.devices)).collect()
            }
            WeightSplit::Layers => {
                let owner = self.owner(config, id);
                (0..=self.devices).map(|device| if device <= owner { 0 } else { outputs }).collect()
            }
        };
        cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
    }

    /// Returns the device with a site's block. The head is on the last device. A separate token embedding is
    /// on the first; its number is one past the head's.
    fn owner(&self, config: &ModelConfig, id: SiteId) -> usize {
        match id.group(config) {
            Some((layer, group)) if group != crate::shape::layout::LinearGroup::Head => {
                layer * self.devices / config.layers
            }
            Some(_) => self.devices - 1,
            None => 0,
        }
    }
}

/// Returns the valid cut that is nearest to `ideal`: a multiple of [`PackedLayout::CUT_ROWS`] within a linear
/// layer, or a layer's end. `rows` are the outputs of the layers, which lie side by side.
fn cut(rows: &[usize], ideal: usize) -> usize {
    let mut base = 0;
    for &rows in rows {
        let within = ideal - base;
        if within <= rows {
            let step = PackedLayout::CUT_ROWS;
            let nearest = (within + step / 2) / step * step;
            return base + if within == rows { rows } else { nearest.min(rows) };
        }
        base += rows;
    }
    base
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_at_multiples_of_64_within_a_layer_or_at_its_end() {
        // [q | k | v] of Qwen2.5-0.5B: half of 1,152 outputs lies within q.
        assert_eq!(cut(&[896, 128, 128], 576), 576);
        assert_eq!(cut(&[896, 128, 128], 600), 576);
        assert_eq!(cut(&[896, 128, 128], 610), 640);
        assert_eq!(cut(&[896, 128, 128], 900), 896);
        assert_eq!(cut(&[100, 100], 90), 64);
        assert_eq!(cut(&[100, 100], 99), 100, "a layer's end is nearer than a multiple of 64");
        assert_eq!(cut(&[100, 100], 200), 200);
        assert_eq!(cut(&[63], 40), 63, "the next multiple of 64 lies beyond the end");
        assert_eq!(cut(&[0, 64], 0), 0);
    }

    #[test]
    fn cuts_of_any_layers_ascend() {
        for rows in [vec![1], vec![64; 3], vec![33, 190, 7], vec![4864, 4864], vec![151_936]] {
            let outputs: usize = rows.iter().sum();
            for devices in 1..=16 {
                let cuts: Vec<_> = (0..=devices).map(|at| cut(&rows, outputs * at / devices)).collect();
                assert!(cuts.is_sorted() && cuts[0] == 0 && cuts[devices] == outputs, "{rows:?}: {cuts:?}");
            }
        }
    }
}
