//! Adapts conversations that a chat template cannot render as they are: several system messages, tool call
//! arguments that are no object, or reasoning content under another name.

use serde_json::{Map, Value, json};

use crate::{
    chat_error::ChatError,
    chat_template::{GenerationPrompt, RenderTemplate, TemplateError},
};

/// Marker texts that are searched in a rendered conversation.
const FIRST: &str = "holobiont-first";
const SECOND: &str = "holobiont-second";

/// How a chat template treats several system messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SystemMessages {
    leading: LeadingSystemMessages,
    later: LaterSystemMessages,
}

/// Several system messages at the beginning of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeadingSystemMessages {
    /// The template renders each message.
    Apart,
    /// The template renders or accepts only one message.
    One,
}

/// System messages after other messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LaterSystemMessages {
    /// The template renders or refuses them.
    Judged,
    /// The template silently drops them.
    Dropped,
}

impl SystemMessages {
    /// Determines how `template` treats system messages by rendering two conversations.
    ///
    /// # Errors
    /// No process could render the template.
    pub fn of(template: &dyn RenderTemplate) -> Result<Self, TemplateError> {
        let shown = |messages: &[(&str, &str)]| {
            let value = |(role, content): &(&str, &str)| json!({ "role": role, "content": content });
            let messages: Vec<Value> = messages.iter().map(value).collect();
            match template.render(&messages, GenerationPrompt::Add, &Map::new()) {
                Err(error @ TemplateError::Unavailable(_)) => Err(error),
                rendered => Ok(rendered.unwrap_or_default()),
            }
        };
        let leading = shown(&[("system", FIRST), ("system", SECOND), ("user", "a")])?;
        let later = shown(&[
            ("system", FIRST),
            ("user", "a"),
            ("assistant", "b"),
            ("system", SECOND),
            ("user", "c"),
        ])?;
        let is_apart = leading.contains(FIRST) && leading.contains(SECOND);
        let is_dropped = later.contains(FIRST) && !later.contains(SECOND);
        Ok(Self {
            leading: if is_apart { LeadingSystemMessages::Apart } else { LeadingSystemMessages::One },
            later: if is_dropped { LaterSystemMessages::Dropped } else { LaterSystemMessages::Judged },
        })
    }

    /// Returns `messages` so that the template renders all of them; leading system messages may be joined.
    ///
    /// # Errors
    /// The template would drop a later system message.
    pub fn prepared(self, mut messages: Vec<Value>) -> Result<Vec<Value>, ChatError> {
        let is_system = |message: &Value| message["role"] == "system";
        let leading = messages.iter().take_while(|message| is_system(message)).count();
        if self.later == LaterSystemMessages::Dropped && messages[leading..].iter().any(is_system) {
            return Err(ChatError::LaterSystem);
        }
        if self.leading == LeadingSystemMessages::One && leading > 1 {
            let texts: Vec<&str> =
                messages[..leading].iter().filter_map(|message| message["content"].as_str()).collect();
            let texts: Vec<&str> = texts.into_iter().filter(|text| !text.is_empty()).collect();
            let first = json!({ "role": "system", "content": texts.join("\n\n") });
            messages.splice(..leading, [first]);
        }
        Ok(messages)
    }
}

/// Gives reasoning content the name `thinking`, if the template reads that (gpt-oss). Such a template refuses
/// a call with both a text and reasoning content, so the text is joined to the latter.
pub fn name_reasoning(template: &str, messages: &mut [Value]) {
    if !template.contains("message.thinking") {
        return;
    }
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        let Some(Value::String(mut reasoning)) = message.remove("reasoning_content") else { continue };
        let text = message.get("content").and_then(Value::as_str).unwrap_or_default();
        if message.contains_key("tool_calls") && !text.is_empty() {
            reasoning = format!("{reasoning}\n{text}");
            message.insert("content".to_owned(), "".into());
        }
        message.insert("thinking".to_owned(), reasoning.into());
    }
}

/// Renders `messages`. Arguments that are no object, as of a truncated call, are tried unchanged first. If
/// the template accepts only objects, such arguments are wrapped in one.
///
/// # Errors
/// `render` fails.
pub fn shown<T>(
    messages: &mut [Value],
    render: impl Fn(&[Value]) -> Result<T, ChatError>,
) -> Result<T, ChatError> {
    match render(messages) {
        Err(ChatError::Template(error)) if !matches!(error, TemplateError::Limit { .. }) => {
            if wrap_arguments(messages) { render(messages) } else { Err(error.into()) }
        }
        rendered => rendered,
    }
}

/// Wraps arguments that are no object; returns false if there are none.
fn wrap_arguments(messages: &mut [Value]) -> bool {
    let calls =
        messages.iter_mut().filter_map(|message| message.get_mut("tool_calls")?.as_array_mut()).flatten();
    let arguments = calls.filter_map(|call| call.get_mut("function")?.get_mut("arguments"));
    let bare = arguments.filter(|arguments| !arguments.is_object());
    let wrap = |arguments: &mut Value| *arguments = json!({ "arguments": arguments.take() });
    bare.map(wrap).count() > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat_template::{ChatTemplate, Limits, TemplateTokens};

    const APART: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    const RAISES: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first only') }}\
                          {% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    const DROPS: &str = "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}\
                         {% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}";

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, TemplateTokens::default(), Limits::default()).unwrap()
    }

    fn message(role: &'static str, content: &str) -> Value {
        json!({ "role": role, "content": content })
    }

    fn rendered(source: &str, messages: &[Value]) -> Result<String, String> {
        let template = template(source);
        let prepared = SystemMessages::of(&template).unwrap().prepared(messages.to_vec());
        let prepared = prepared.map_err(|error| error.to_string())?;
        let rendered = template.render(&prepared, GenerationPrompt::Omit, &Map::new());
        rendered.map_err(|error| error.to_string())
    }

    #[test]
    fn reasoning_content_has_the_name_that_the_template_reads() {
        let call = json!([{ "function": { "name": "f" } }]);
        let called = json!({ "content": "b", "reasoning_content": "a", "tool_calls": call });
        let messages =
            [json!({ "content": "b", "reasoning_content": "a" }), called, json!({ "content": "c" })];
        let named = |template: &str| {
            let mut messages = messages.clone();
            name_reasoning(template, &mut messages);
            messages
        };
        assert_eq!(named("{{ message.reasoning_content }}"), messages);
        let [thought, called, other] = named("{{ message.thinking }}");
        assert_eq!(thought, json!({ "content": "b", "thinking": "a" }));
        assert_eq!(called, json!({ "content": "", "thinking": "a\nb", "tool_calls": call }));
        assert_eq!(other, messages[2]);
    }

    #[test]
    fn leading_system_messages_are_joined_where_a_template_takes_one_and_stay_apart_elsewhere() {
        let messages = [message("system", "French."), message("system", "zebra"), message("user", "Say it.")];
        assert_eq!(rendered(APART, &messages).unwrap(), "<system>French.<system>zebra<user>Say it.");
        for source in [RAISES, DROPS] {
            assert_eq!(rendered(source, &messages).unwrap(), "<system>French.\n\nzebra<user>Say it.");
        }
        assert_eq!(rendered(DROPS, &messages[1..]).unwrap(), "<system>zebra<user>Say it.");
    }

    #[test]
    fn a_later_system_message_is_shown_or_refused_and_never_dropped() {
        let messages = [message("user", "a"), message("system", "zebra"), message("user", "b")];
        assert_eq!(rendered(APART, &messages).unwrap(), "<user>a<system>zebra<user>b");
        assert!(rendered(RAISES, &messages).unwrap_err().contains("first only"));
        assert!(rendered(DROPS, &messages).unwrap_err().contains("system messages"));
    }

    #[test]
    fn arguments_that_are_no_object_are_shown_to_every_template() {
        let render = |source: &str, arguments: &Value| {
            let call = json!({ "function": { "name": "f", "arguments": arguments } });
            let mut messages = vec![json!({ "role": "assistant", "content": "", "tool_calls": [call] })];
            let template = template(source);
            shown(&mut messages, |messages| {
                Ok(template.render(messages, GenerationPrompt::Omit, &Map::new())?)
            })
            .unwrap()
        };
        const WRITES: &str = "{{ messages[0].tool_calls[0].function.arguments | tojson }}";
        const ITERATES: &str =
            "{% for k, v in messages[0].tool_calls[0].function.arguments|items %}{{ k }}={{ v }}{% endfor %}";
        assert_eq!(render(WRITES, &json!("{\"city\": \"Par")), "\"{\\\"city\\\": \\\"Par\"");
        assert_eq!(render(ITERATES, &json!({ "city": "Paris" })), "city=Paris");
        assert_eq!(render(ITERATES, &json!("{\"city\": \"Par")), "arguments={\"city\": \"Par");
        assert_eq!(render(ITERATES, &json!(7)), "arguments=7");
    }
}
