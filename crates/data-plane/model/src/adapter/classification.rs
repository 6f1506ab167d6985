//! Classification heads: linear layers from the last hidden state of a prompt to the logits of labels.

/// A linear layer from a hidden state, after the final norm, to one logit per label.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassificationHead {
    /// Names of the labels; at least one.
    labels: Vec<String>,
    /// Matrix of shape `[labels, hidden]`, row-major.
    weight: Vec<f32>,
    /// One value per label, or none.
    bias: Option<Vec<f32>>,
}

impl ClassificationHead {
    /// Builds a head from `weight`, shape `[labels, hidden]`, and `bias`, shape `[labels]`.
    ///
    /// # Panics
    /// If there is no label, or the shapes do not fit.
    #[must_use]
    pub fn new(labels: Vec<String>, weight: Vec<f32>, bias: Option<Vec<f32>>) -> Self {
        assert!(!labels.is_empty() && weight.len().is_multiple_of(labels.len()), "a row for each label");
        assert!(bias.as_ref().is_none_or(|bias| bias.len() == labels.len()), "a bias for each label");
        Self { labels, weight, bias }
    }

    /// Returns the names of the labels, in the order of the logits.
    #[must_use]
    pub fn labels(&self) -> &[String] {
        &self.labels
    }

    /// Returns the bytes of all values and names.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let values = self.weight.len() + self.bias.as_ref().map_or(0, Vec::len);
        values * size_of::<f32>() + self.labels.iter().map(String::len).sum::<usize>()
    }

    /// Returns the logit of each label for the hidden state `state`. Sums are of 64 bits, in the order of the
    /// elements, so the bits depend on head and state alone.
    ///
    /// # Panics
    /// If the state has another length than the head's rows.
    #[must_use]
    pub fn logits(&self, state: &[f32]) -> Vec<f32> {
        assert_eq!(self.weight.len(), state.len() * self.labels.len(), "a state of the head's width");
        let rows = self.weight.chunks_exact(state.len()).enumerate();
        let logit = |(label, row): (usize, &[f32])| {
            let begin = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[label]));
            let products =
                row.iter().zip(state).map(|(weight, value)| f64::from(*weight) * f64::from(*value));
            #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
            let sum = products.fold(begin, |sum, product| sum + product) as f32;
            sum
        };
        rows.map(logit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logit_is_the_product_of_its_row_and_the_state_with_the_bias() {
        let labels = ["no", "yes"].map(str::to_owned).to_vec();
        let head = |bias| ClassificationHead::new(labels.clone(), vec![1.0, 2.0, 0.5, -1.0], bias);
        assert_eq!(head(None).logits(&[3.0, 4.0]), [11.0, -2.5]);
        assert_eq!(head(Some(vec![0.5, 1.0])).logits(&[3.0, 4.0]), [11.5, -1.5]);
        assert_eq!(head(Some(vec![0.5, 1.0])).bytes(), 24 + 5);
    }
}
