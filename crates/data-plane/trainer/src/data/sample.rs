//! The content of a line, independent of the line's kind.

use std::collections::BTreeMap;

use control_protocol::training::spec::TrainingMethod;
use serde_json::{Map, Value};

use super::{
    distillation_data::DistillationSamples,
    fault::LineFault,
    fields::{LineFields, learned, text, wrong},
    kind::DataKind,
    message::{MessageRole, SampleMessage, each, learned_or_not, message, messages},
    rating, tool_data,
};

/// Fields of a line that would change what the model is shown or learns, and that no reader takes.
pub(super) const REFUSED: [&str; 10] = [
    "documents",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "loss_weight",
    "sample_weight",
    "kto_tag",
];

/// Maximum weight of a line.
const MAX_WEIGHT: f64 = 1000.0;

/// Names of a system prompt beside the messages.
const SYSTEM: [&str; 2] = ["system", "system_prompt"];

/// Variables of the chat template that other fields of a line set.
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

const SHARE_GPT_ROLES: [(&str, MessageRole); 8] = [
    ("system", MessageRole::System),
    ("human", MessageRole::User),
    ("user", MessageRole::User),
    ("gpt", MessageRole::Assistant),
    ("assistant", MessageRole::Assistant),
    ("function_call", MessageRole::Assistant),
    ("tool", MessageRole::Tool),
    ("observation", MessageRole::Tool),
];

/// Messages, and what the chat template shows beside them.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Conversation {
    pub(super) messages: Vec<SampleMessage>,
    /// Variables of the chat template: `tools`, and those of `chat_template_kwargs`.
    pub(super) variables: Map<String, Value>,
}

#[derive(Debug, PartialEq)]
pub(super) enum TrainingSample {
    /// Learns the assistant's messages, of which there is at least one.
    Conversation(Conversation),
    Continuation {
        prompt: String,
        completion: String,
    },
    Text(String),
    /// Learns which of two answers to a conversation is better.
    Comparison {
        asked: Conversation,
        chosen: SampleMessage,
        rejected: SampleMessage,
    },
    /// Learns which of two continuations of a text is better.
    TextComparison {
        prompt: String,
        chosen: String,
        rejected: String,
    },
    /// Learns whether an answer to a conversation is good.
    Rated {
        asked: Conversation,
        answer: SampleMessage,
        is_desirable: bool,
    },
    /// Learns whether a continuation of a text is good.
    RatedText {
        prompt: String,
        completion: String,
        is_desirable: bool,
    },
    /// Recorded answers of a model to a conversation.
    Answered {
        asked: Conversation,
        answers: DistillationSamples,
    },
}

/// Reads a line of the given kind.
pub(super) fn read(kind: DataKind, line: &mut LineFields) -> Result<TrainingSample, LineFault> {
    if let Some(form) = kind.unrated() {
        let is_desirable = read_rating(line)?;
        return rated(read(form, line)?, kind, is_desirable);
    }
    line.refuse(&REFUSED)?;
    match kind {
        DataKind::Text => {
            refuse_shown(line)?;
            Ok(TrainingSample::Text(learned("text", line.required("text")?)?))
        }
        DataKind::PromptCompletion => prompt_completion(line),
        DataKind::Alpaca => answered_question(line, ["instruction", "output"]),
        DataKind::Question => {
            refuse_rating(line)?;
            answered_question(line, ["question", "response"])
        }
        DataKind::Messages => conversation(openai_conversation(line)?),
        DataKind::Answers => {
            let asked = openai_conversation(line)?;
            Ok(TrainingSample::Answered { asked, answers: DistillationSamples::read(line)? })
        }
        DataKind::ShareGpt => conversation(share_gpt(line)?),
        DataKind::Preference => preference(line),
        DataKind::OpenAiPreference => openai_preference(line),
        // These have an unrated form, which is read above.
        DataKind::RatedMessages
        | DataKind::RatedShareGpt
        | DataKind::RatedCompletion
        | DataKind::RatedAlpaca => Err(LineFault::NoRatedAnswer),
        DataKind::Prompts => unreachable!("no line has this kind by its fields"),
    }
}

/// Reads the weight of a line, which multiplies its loss: 1 if the line has none. A negative weight teaches
/// the model to avoid the answer.
pub(super) fn weight(kind: DataKind, line: &mut LineFields) -> Result<f32, LineFault> {
    if kind.method() != Some(TrainingMethod::Sft) {
        line.refuse(&["weight"])?;
        return Ok(1.0);
    }
    let Some(weight) = line.take("weight") else { return Ok(1.0) };
    let weight = weight.as_f64().filter(|weight| weight.abs() <= MAX_WEIGHT);
    let fault = || LineFault::LineWeight { field: line.path("weight"), limit: MAX_WEIGHT };
    Ok(weight.ok_or_else(fault)? as f32)
}

/// Reads the field `messages`.
pub(super) fn openai_conversation(line: &mut LineFields) -> Result<Conversation, LineFault> {
    let value = line.required("messages")?;
    let messages = messages(line, "messages", value)?;
    in_context(line, messages)
}

/// Adds to `messages` what the line says beside them: the system prompt, tools, and template variables.
pub(super) fn in_context(
    line: &mut LineFields,
    mut messages: Vec<SampleMessage>,
) -> Result<Conversation, LineFault> {
    for name in SYSTEM {
        let Some(system) = line.text(name)?.filter(|text| !text.is_empty()) else { continue };
        match messages.first() {
            // Some files repeat the first message in a field of its own.
            Some(first) if first.role == MessageRole::System && first.content == system => {}
            Some(first) if first.role == MessageRole::System => {
                return Err(LineFault::TwoSystemPrompts { field: line.path(name) });
            }
            _ => messages.insert(0, SampleMessage::new(MessageRole::System, system)),
        }
    }
    let mut variables = template_variables(line)?;
    if let Some(tools) = tool_data::read_tools(line)? {
        variables.insert("tools".to_owned(), tools);
    }
    Ok(Conversation { messages, variables })
}

/// Reads `chat_template_kwargs`, as TRL and vLLM name the template's variables.
fn template_variables(line: &mut LineFields) -> Result<Map<String, Value>, LineFault> {
    const FIELD: &str = "chat_template_kwargs";
    let variables = match line.take(FIELD) {
        None => return Ok(Map::new()),
        Some(Value::Object(variables)) => variables,
        Some(other) => return Err(wrong(line.path(FIELD), "an object", &other)),
    };
    match variables.keys().find(|name| RESERVED.contains(&name.as_str())) {
        Some(name) => Err(LineFault::Unsupported { field: line.path(&format!("{FIELD}.{name}")) }),
        None => Ok(variables),
    }
}

/// Refuses what only a chat template could show, in a line that no template renders.
pub(super) fn refuse_shown(line: &mut LineFields) -> Result<(), LineFault> {
    line.refuse(&["tools", "functions", "chat_template_kwargs", "system", "system_prompt"])
}

fn conversation(conversation: Conversation) -> Result<TrainingSample, LineFault> {
    if conversation.messages.iter().any(|message| message.is_learned) {
        Ok(TrainingSample::Conversation(conversation))
    } else {
        Err(LineFault::NothingToLearn)
    }
}

/// Reads the rating of a line: true if its answer is desirable.
pub(super) fn read_rating(line: &mut LineFields) -> Result<bool, LineFault> {
    let mut read: Option<(&str, bool)> = None;
    for field in rating::FIELDS {
        let Some(value) = line.take(field) else { continue };
        let is_desirable =
            rating::rating(&value).ok_or_else(|| wrong(line.path(field), "true or false", &value))?;
        match read {
            Some((other, earlier)) if earlier != is_desirable => {
                return Err(LineFault::Twice { field: line.path(field), other: line.path(other) });
            }
            _ => read = Some((field, is_desirable)),
        }
    }
    let (_, is_desirable) = read.ok_or_else(|| LineFault::Missing { field: line.path(rating::FIELDS[0]) })?;
    Ok(is_desirable)
}

/// Returns `sample`, of a line of `kind`, with the rating of its last answer; earlier answers are only shown.
fn rated(sample: TrainingSample, kind: DataKind, is_desirable: bool) -> Result<TrainingSample, LineFault> {
    let Conversation { mut messages, variables } = match sample {
        TrainingSample::Conversation(conversation) => conversation,
        TrainingSample::Continuation { prompt, completion } => {
            return Ok(TrainingSample::RatedText { prompt, completion, is_desirable });
        }
        _ => return Err(LineFault::NoRatedAnswer),
    };
    let answers = messages.iter().filter(|message| message.is_learned).count();
    let has_one_completion = kind != DataKind::RatedCompletion || answers == 1;
    match messages.pop().filter(|answer| answer.is_learned && has_one_completion) {
        Some(answer) => {
            Ok(TrainingSample::Rated { asked: Conversation { messages, variables }, answer, is_desirable })
        }
        None => Err(LineFault::NoRatedAnswer),
    }
}

/// Refuses a rating of a line whose kind has none: a bad answer would be learned like a good one.
fn refuse_rating(line: &LineFields) -> Result<(), LineFault> {
    let is_rating = |field: &&&str| line.peek(field).is_some_and(|value| rating::rating(value).is_some());
    match rating::FIELDS.iter().find(is_rating) {
        Some(field) => Err(LineFault::Rated { field: line.path(field) }),
        None => Ok(()),
    }
}

fn prompt_completion(line: &mut LineFields) -> Result<TrainingSample, LineFault> {
    let (prompt, completion) = (line.required("prompt")?, line.required("completion")?);
    if prompt.is_array() {
        let mut conversed = messages(line, "prompt", prompt)?;
        conversed.iter_mut().for_each(|message| message.is_learned = false);
        conversed.extend(messages(line, "completion", completion)?);
        return conversation(in_context(line, conversed)?);
    }
    refuse_shown(line)?;
    let prompt = text("prompt".to_owned(), prompt)?;
    let completion = learned("completion", completion)?;
    Ok(TrainingSample::Continuation { prompt, completion })
}

/// Reads a question from the field `asks` and its answer from `answers`; earlier answers are learned too.
fn answered_question(
    line: &mut LineFields,
    [asks, answers]: [&'static str; 2],
) -> Result<TrainingSample, LineFault> {
    let answer = learned(answers, line.required(answers)?)?;
    let mut conversed = question(line, asks)?;
    conversed.messages.push(SampleMessage::new(MessageRole::Assistant, answer));
    conversation(conversed)
}

/// Reads a question from the field `asks`, with an `input` and a `history` of earlier turns. Alpaca's own
/// text around instruction and input was for a model without a chat template, so it is left out.
pub(super) fn question(line: &mut LineFields, asks: &'static str) -> Result<Conversation, LineFault> {
    let question = line.required_text(asks)?;
    let question = match line.text("input")? {
        Some(input) if !input.is_empty() => format!("{question}\n\n{input}"),
        _ => question,
    };
    let mut messages = history(line)?;
    messages.push(SampleMessage::asks(question));
    in_context(line, messages)
}

/// Reads LLaMA-Factory's earlier turns, each a question and an answer.
fn history(line: &mut LineFields) -> Result<Vec<SampleMessage>, LineFault> {
    let turns = match line.take("history") {
        None => return Ok(Vec::new()),
        Some(Value::Array(turns)) => turns,
        Some(other) => return Err(wrong(line.path("history"), "an array of turns", &other)),
    };
    let mut messages = Vec::new();
    for (index, turn) in turns.into_iter().enumerate() {
        let path = format!("{}[{index}]", line.path("history"));
        let [asked, answer] = match turn {
            Value::Array(pair) => <[Value; 2]>::try_from(pair)
                .map_err(|pair| wrong(path.clone(), "a question and an answer", &Value::Array(pair)))?,
            other => return Err(wrong(path, "a question and an answer", &other)),
        };
        messages.push(SampleMessage::asks(text(format!("{path}[0]"), asked)?));
        let answer = learned(&format!("{path}[1]"), answer)?;
        messages.push(SampleMessage::new(MessageRole::Assistant, answer));
    }
    Ok(messages)
}

pub(super) fn share_gpt(line: &mut LineFields) -> Result<Conversation, LineFault> {
    let value = line.required("conversations")?;
    let mut called = BTreeMap::new();
    let messages = each(line, "conversations", value, |fields| {
        // Some files have OpenAI's messages under ShareGPT's name.
        if fields.has("role") && !fields.has("from") { message(fields, &mut called) } else { said(fields) }
    })?;
    in_context(line, messages)
}

/// Reads a message in ShareGPT's format.
fn said(fields: &mut LineFields) -> Result<SampleMessage, LineFault> {
    let calls = fields.peek("from").is_some_and(|from| from == "function_call");
    let role = fields.parse_word("from", &SHARE_GPT_ROLES, "system, human, gpt or tool")?;
    let value = fields.required_text("value")?;
    let mut message = SampleMessage::new(role, String::new());
    if calls {
        message.show("tool_calls", Some(tool_data::read_call_text(fields, value)?));
    } else {
        message.content = value;
    }
    learned_or_not(fields, "value", message)
}

fn preference(line: &mut LineFields) -> Result<TrainingSample, LineFault> {
    let (chosen, rejected) = (line.required("chosen")?, line.required("rejected")?);
    if !chosen.is_array() {
        refuse_shown(line)?;
        let prompt = line.text("prompt")?.unwrap_or_default();
        let (chosen, rejected) = (learned("chosen", chosen)?, learned("rejected", rejected)?);
        return if chosen == rejected {
            Err(LineFault::SameAnswers)
        } else {
            Ok(TrainingSample::TextComparison { prompt, chosen, rejected })
        };
    }
    let (chosen, rejected) = (messages(line, "chosen", chosen)?, messages(line, "rejected", rejected)?);
    let asked = match line.take("prompt") {
        None => Vec::new(),
        // Beside whole conversations, `prompt` repeats the first user message.
        Some(Value::String(prompt)) => match chosen.first() {
            Some(first) if first.role != MessageRole::Assistant => Vec::new(),
            _ => vec![SampleMessage::asks(prompt)],
        },
        Some(asked) => messages(line, "prompt", asked)?,
    };
    comparison(line, asked, chosen, rejected)
}

fn openai_preference(line: &mut LineFields) -> Result<TrainingSample, LineFault> {
    let value = line.required("input")?;
    let mut input = line.at("input".to_owned(), value)?;
    input.refuse(&REFUSED)?;
    let asked = input.required("messages")?;
    let asked = messages(&input, "input.messages", asked)?;
    let (chosen, rejected) = (line.required("preferred_output")?, line.required("non_preferred_output")?);
    let chosen = messages(line, "preferred_output", chosen)?;
    let rejected = messages(line, "non_preferred_output", rejected)?;
    comparison(&mut input, asked, chosen, rejected)
}

/// Compares two answers, from conversations that may both begin with the messages they answer. `line` has
/// the tools.
fn comparison(
    line: &mut LineFields,
    mut asked: Vec<SampleMessage>,
    mut chosen: Vec<SampleMessage>,
    mut rejected: Vec<SampleMessage>,
) -> Result<TrainingSample, LineFault> {
    let (Some(better), Some(worse)) = (chosen.pop(), rejected.pop()) else {
        return Err(LineFault::NoComparison);
    };
    let answers = better.role == MessageRole::Assistant && worse.role == MessageRole::Assistant;
    let same_start = chosen.len() == rejected.len()
        && chosen.iter().zip(&rejected).all(|(one, other)| one.shows_as(other));
    if !answers || !same_start {
        return Err(LineFault::NoComparison);
    }
    if better.shows_as(&worse) {
        return Err(LineFault::SameAnswers);
    }
    asked.append(&mut chosen);
    Ok(TrainingSample::Comparison { asked: in_context(line, asked)?, chosen: better, rejected: worse })
}
