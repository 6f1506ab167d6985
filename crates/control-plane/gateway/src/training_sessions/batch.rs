//! Conversion of a client's batch into a trainer command, and of the trainer's result into an answer.

use std::collections::{BTreeMap, HashMap};

use control_protocol::training::session::{CommandDone, CommandRefusal, MAX_NUMBERS, TrainingCommand};

use super::{
    future_result::FutureResult,
    wire::{
        ArrayRecord, BatchedTensor, ChunkKind, DType, Datum, ForwardBackwardOutput, ForwardBackwardRequest,
        LossConfig, LossConfigValue, ModelInputChunk, TensorData, Values,
    },
};

/// Input that every loss needs.
const TARGETS: &str = "target_tokens";
/// Maximum length in bytes of the name of a loss, an option or an input.
const MAX_NAME_BYTES: usize = 64;
/// Maximum number of options, and of inputs.
const MAX_NAMES: usize = 16;

/// Command to evaluate sequences, with its values.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainingBatch {
    pub order: TrainingCommand,
    /// Values of all sequences, 4 bytes each.
    pub numbers: Vec<u8>,
    /// Number of tokens of each sequence.
    lengths: Vec<usize>,
}

impl TrainingBatch {
    /// Converts a request.
    ///
    /// # Errors
    /// If the request uses a feature that is not supported; the error names it.
    pub fn read(request: &ForwardBackwardRequest) -> Result<Self, CommandRefusal> {
        let inputs = inputs(&request.data);
        check_names("loss_fn", std::iter::once(request.loss_fn.as_str()))?;
        check_names("loss_fn_inputs", inputs.iter().copied())?;
        let options = options(request)?;
        let (mut numbers, mut lengths) = (Vec::new(), Vec::new());
        for (number, datum) in request.data.iter().enumerate() {
            let length = push(&mut numbers, datum, &inputs);
            lengths.push(length.map_err(|why| CommandRefusal::user(format!("datum {number}: {why}")))?);
        }
        numbers.shrink_to_fit();
        let order = TrainingCommand::ForwardBackward {
            loss: request.loss_fn.clone(),
            options,
            forward_only: request.forward_only,
            lengths: lengths.clone(),
            inputs: inputs.into_iter().map(str::to_owned).collect(),
        };
        if order.numbers().is_none() {
            return Err(CommandRefusal::user(format!(
                "a request may have at most {MAX_NUMBERS} numbers; send fewer tokens at once"
            )));
        }
        // A trainer ends when it reads a longer line.
        order.line()?;
        Ok(Self { order, numbers, lengths })
    }

    /// Bytes that the batch keeps until it is evaluated. The trainer's result needs no more.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.numbers.len() + 2 * size_of_val(&*self.lengths)
    }

    /// Converts the trainer's result into an answer for the client.
    #[must_use]
    pub fn answer(&self, done: CommandDone, logprobs: Vec<u8>) -> FutureResult {
        let mut offsets = vec![0i64];
        let mut end = 0;
        for length in &self.lengths {
            end += i64::try_from(length * size_of::<f32>()).unwrap_or(i64::MAX);
            offsets.push(end);
        }
        let logprobs = BatchedTensor {
            data: logprobs,
            offsets: offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect(),
            dtype: DType::Float32.into(),
            trailing_shape: Vec::new(),
        };
        let record = ArrayRecord {
            type_tag: String::new(),
            fields: HashMap::from([("logprobs".to_owned(), logprobs)]),
            num_datums: i64::try_from(self.lengths.len()).unwrap_or(i64::MAX),
        };
        let output = ForwardBackwardOutput {
            loss_fn_output_type: "ArrayRecord".to_owned(),
            loss_fn_outputs: vec![record],
            metrics: done.metrics.into_iter().collect(),
        };
        FutureResult::Protobuf(prost::Message::encode_to_vec(&output).into())
    }
}

/// Appends the values of one sequence; returns its number of tokens.
fn push(numbers: &mut Vec<u8>, datum: &Datum, inputs: &[&str]) -> Result<usize, String> {
    let tokens = tokens(&datum.model_input)?;
    let length = tokens.len() / size_of::<i32>();
    numbers.extend(tokens);
    let targets = datum.loss_fn_inputs.get(TARGETS).ok_or("it has no target_tokens")?;
    numbers.extend(integers(targets, length).map_err(|why| format!("'{TARGETS}' {why}"))?);
    if datum.loss_fn_inputs.len() != inputs.len() + 1 {
        return Err("its loss_fn_inputs have other names than those of the first datum".to_owned());
    }
    for name in inputs {
        let input = datum.loss_fn_inputs.get(*name);
        let input = input.ok_or_else(|| format!("it has no '{name}', unlike the first datum"))?;
        numbers.extend(floats(input, length).map_err(|why| format!("'{name}' {why}"))?);
    }
    Ok(length)
}

/// Returns the names of the first datum's inputs except the targets, in order.
fn inputs(data: &[Datum]) -> Vec<&str> {
    let names = data.first().into_iter().flat_map(|datum| datum.loss_fn_inputs.keys());
    let mut names: Vec<&str> = names.map(String::as_str).filter(|name| *name != TARGETS).collect();
    names.sort_unstable();
    names
}

/// Checks names before they are kept until the batch is evaluated; no loss has names of this length or
/// number.
fn check_names<'a>(field: &str, names: impl Iterator<Item = &'a str>) -> Result<(), CommandRefusal> {
    for (number, name) in names.enumerate() {
        if number >= MAX_NAMES {
            return Err(CommandRefusal::user(format!("'{field}' has more than {MAX_NAMES} names")));
        }
        if name.len() > MAX_NAME_BYTES {
            return Err(CommandRefusal::user(format!(
                "a name in '{field}' is longer than {MAX_NAME_BYTES} bytes"
            )));
        }
    }
    Ok(())
}

fn options(request: &ForwardBackwardRequest) -> Result<BTreeMap<String, f64>, CommandRefusal> {
    let (older, newer) = (&request.loss_fn_config, &request.loss_fn_config_v2);
    check_names("loss_fn_config", older.keys().chain(newer.keys()).map(String::as_str))?;
    let number = |value: &LossConfigValue| match value.value {
        Some(LossConfig::Number(number)) => Some(number),
        _ => None,
    };
    let options: Vec<(&String, Option<f64>)> = if newer.is_empty() {
        older.iter().map(|(name, &value)| (name, Some(value))).collect()
    } else {
        newer.iter().map(|(name, value)| (name, number(value))).collect()
    };
    let finite = |(name, value): (&String, Option<f64>)| match value.filter(|value| value.is_finite()) {
        Some(value) => Ok((name.clone(), value)),
        // The trainer receives options in JSON, which has no infinities and no NaN.
        None => Err(CommandRefusal::user(format!("'{name}' in loss_fn_config must be a finite number"))),
    };
    options.into_iter().map(finite).collect()
}

fn tokens(chunks: &[ModelInputChunk]) -> Result<Vec<u8>, String> {
    let mut tokens = Vec::new();
    for chunk in chunks {
        match &chunk.kind {
            Some(ChunkKind::EncodedText(text)) if text.tokens.len().is_multiple_of(size_of::<i32>()) => {
                tokens.extend_from_slice(&text.tokens);
            }
            Some(ChunkKind::Image(_)) => return Err("images are not supported; send only text".to_owned()),
            Some(ChunkKind::Dmel(_)) => return Err("audio is not supported; send only text".to_owned()),
            Some(ChunkKind::EncodedText(_)) | None => {
                return Err("a chunk of its model_input is not valid".to_owned());
            }
        }
    }
    Ok(tokens)
}

/// Returns the values of a dense tensor with one dimension.
fn dense(tensor: &TensorData, length: usize) -> Result<&[u8], String> {
    let is_flat = match tensor.shape[..] {
        [] => true,
        [count] => usize::try_from(count) == Ok(length),
        _ => {
            return Err(format!(
                "has the shape {:?}; only one number for each token is supported",
                tensor.shape
            ));
        }
    };
    match &tensor.values {
        Some(Values::Dense(values)) if is_flat => Ok(values),
        Some(Values::Dense(_)) | None => Err(format!("must have {length} numbers, one for each token")),
        Some(Values::SparseCsr(_)) => Err("is sparse, which is not supported; send it dense".to_owned()),
    }
}

fn integers(tensor: &TensorData, length: usize) -> Result<Vec<u8>, String> {
    let values = dense(tensor, length)?;
    let wide = match tensor.dtype() {
        DType::Int64 => values.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        DType::Int32 => {
            values.as_chunks::<4>().0.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes))).collect()
        }
        _ => Vec::new(),
    };
    if wide.len() != length {
        return Err(format!("must have {length} integers, one for each token"));
    }
    let narrow: Option<Vec<[u8; 4]>> =
        wide.iter().map(|&token| u32::try_from(token).ok().map(u32::to_le_bytes)).collect();
    narrow.map(|narrow| narrow.concat()).ok_or_else(|| "has a value that is not a token id".to_owned())
}

fn floats(tensor: &TensorData, length: usize) -> Result<&[u8], String> {
    let values = dense(tensor, length)?;
    if tensor.dtype() == DType::Float32 && values.len() == length * size_of::<f32>() {
        return Ok(values);
    }
    Err(format!("must have {length} floats of 32 bits, one for each token"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training_sessions::wire::{EncodedText, IgnoredMessage, SparseCsr};

    fn tensor(dtype: DType, values: Vec<u8>, shape: &[i64]) -> TensorData {
        TensorData { values: Some(Values::Dense(values)), dtype: dtype.into(), shape: shape.to_vec() }
    }

    /// Request with two tokens, their targets and weights.
    fn request() -> ForwardBackwardRequest {
        let text = EncodedText { tokens: [5i32, 6].iter().flat_map(|token| token.to_le_bytes()).collect() };
        let targets = [6i64, 7].iter().flat_map(|token| token.to_le_bytes()).collect();
        let weights = [0.0f32, 1.0].iter().flat_map(|weight| weight.to_le_bytes()).collect();
        let datum = Datum {
            model_input: vec![ModelInputChunk { kind: Some(ChunkKind::EncodedText(text)) }],
            loss_fn_inputs: HashMap::from([
                (TARGETS.to_owned(), tensor(DType::Int64, targets, &[2])),
                ("weights".to_owned(), tensor(DType::Float32, weights, &[2])),
            ]),
        };
        ForwardBackwardRequest {
            loss_fn: "cross_entropy".to_owned(),
            data: vec![datum],
            ..ForwardBackwardRequest::default()
        }
    }

    #[test]
    fn a_batch_is_its_tokens_targets_and_inputs() {
        let batch = TrainingBatch::read(&request()).unwrap();
        let numbers = [5u32, 6, 6, 7, 0, 1.0f32.to_bits()];
        assert_eq!(batch.numbers, numbers.map(u32::to_le_bytes).concat());
        assert_eq!(batch.order.numbers(), Some(numbers.len()));
    }

    #[test]
    fn what_is_not_understood_of_a_batch_is_named() {
        let refused = |change: &dyn Fn(&mut ForwardBackwardRequest)| {
            let mut request = request();
            change(&mut request);
            TrainingBatch::read(&request).unwrap_err().message
        };
        let weights = |tensor: TensorData| {
            refused(&move |request| {
                request.data[0].loss_fn_inputs.insert("weights".to_owned(), tensor.clone());
            })
        };
        let image = ModelInputChunk { kind: Some(ChunkKind::Image(IgnoredMessage {})) };
        assert!(refused(&|request| request.data[0].model_input.push(image.clone())).contains("images"));
        let sparse = TensorData {
            values: Some(Values::SparseCsr(SparseCsr::default())),
            dtype: DType::Float32.into(),
            shape: vec![2],
        };
        assert!(weights(sparse).contains("sparse"));
        assert!(weights(tensor(DType::Float32, vec![0; 16], &[2, 2])).contains("[2, 2]"));
        assert!(weights(tensor(DType::Float32, vec![0; 4], &[1])).contains("2 numbers"));
        assert!(weights(tensor(DType::Int64, vec![0; 16], &[2])).contains("floats"));
        let without =
            |name: &'static str| refused(&move |request| drop(request.data[0].loss_fn_inputs.remove(name)));
        assert!(without(TARGETS).contains(TARGETS));
        let word = LossConfigValue { value: Some(LossConfig::Text("a".to_owned())) };
        let message = refused(&|request| {
            request.loss_fn_config_v2.insert("beta".to_owned(), word.clone());
        });
        assert!(message.contains("beta"));
        let message = refused(&|request| {
            request.loss_fn_config.insert("beta".to_owned(), f64::NAN);
        });
        assert!(message.contains("'beta'") && message.contains("finite"), "{message}");
    }

    #[test]
    fn names_of_any_length_and_number_are_refused_in_few_words() {
        let long = "a".repeat(8 << 20);
        let refused = |change: &dyn Fn(&mut ForwardBackwardRequest)| {
            let mut request = request();
            change(&mut request);
            let message = TrainingBatch::read(&request).unwrap_err().message;
            assert!(message.len() < 200, "{} bytes", message.len());
            message
        };
        assert!(refused(&|request| request.loss_fn.clone_from(&long)).contains("'loss_fn'"));
        let option = refused(&|request| {
            request.loss_fn_config.insert(long.clone(), 1.0);
        });
        assert!(option.contains("'loss_fn_config'"), "{option}");
        let word = LossConfigValue { value: Some(LossConfig::Number(1.0)) };
        let message = refused(&|request| drop(request.loss_fn_config_v2.insert(long.clone(), word.clone())));
        assert!(message.contains("'loss_fn_config'"));
        let many = refused(&|request| {
            request.loss_fn_config.extend((0..=MAX_NAMES).map(|number| (number.to_string(), 0.0)));
        });
        assert!(many.contains("more than 16"), "{many}");
        let input = refused(&|request| {
            let weights = request.data[0].loss_fn_inputs.remove("weights").unwrap();
            request.data[0].loss_fn_inputs.insert(long.clone(), weights);
        });
        assert!(input.contains("'loss_fn_inputs'"), "{input}");
    }
}
