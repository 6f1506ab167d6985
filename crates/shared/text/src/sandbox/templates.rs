//! Renders the chat templates that tenants bring, which may build strings of any size.

use std::{
    borrow::Cow,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    CPU_MS, MEMORY_BYTES,
    helper::{Helper, HelperError},
    work::Work,
};
use crate::chat_template::{
    ChatTemplate, GenerationPrompt, Limits, RenderTemplate, TemplateError, TemplateTokens,
};

/// Renders templates in helper processes, one for each thread that renders at the same time, and checks new
/// templates in another, one after the other. So loads of adapters do not delay conversations.
#[derive(Debug)]
pub struct TemplateSandbox {
    program: PathBuf,
    idle: Mutex<Vec<Helper<Render>>>,
    checker: Mutex<Helper<Render>>,
}

impl TemplateSandbox {
    /// Creates a sandbox; `program` becomes a helper process by its first argument.
    #[must_use]
    pub fn new(program: PathBuf) -> Self {
        let checker = Mutex::new(Helper::new(program.clone(), Arc::new(())));
        Self { program, idle: Mutex::default(), checker }
    }

    fn check(&self, question: &Question<'_>) -> Result<(), TemplateError> {
        let mut checker = self.checker.lock().unwrap_or_else(PoisonError::into_inner);
        Self::flatten_errors(checker.ask(question)).map(|_| ())
    }

    fn render(&self, question: &Question<'_>) -> Result<String, TemplateError> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().pop();
        let mut helper = taken.unwrap_or_else(|| Helper::new(self.program.clone(), Arc::new(())));
        let answer = helper.ask(question);
        idle().push(helper);
        Self::flatten_errors(answer)
    }

    fn flatten_errors(
        answer: Result<<Render as Work>::Answer, HelperError>,
    ) -> Result<String, TemplateError> {
        answer.unwrap_or_else(|error| {
            Err(match error {
                HelperError::TooMuch => TemplateError::Limit {
                    limit: format!("{CPU_MS} ms or {} MiB of memory", MEMORY_BYTES >> 20),
                },
                HelperError::Failed => TemplateError::Render("the template engine failed".to_owned()),
                HelperError::Unavailable(why) => TemplateError::Unavailable(why),
            })
        })
    }
}

/// A chat template that is compiled and rendered in a [`TemplateSandbox`] alone.
#[derive(Debug)]
pub struct SandboxedTemplate {
    sandbox: Arc<TemplateSandbox>,
    source: Arc<str>,
    tokens: TemplateTokens,
}

impl SandboxedTemplate {
    /// Names a template, which is not compiled yet.
    #[must_use]
    pub fn new(sandbox: Arc<TemplateSandbox>, source: Arc<str>, tokens: TemplateTokens) -> Self {
        Self { sandbox, source, tokens }
    }

    /// Compiles the template. Blocks until a helper process has answered.
    ///
    /// # Errors
    /// If the template is no valid Jinja, or its compilation exceeds the limits.
    pub fn check(&self) -> Result<(), TemplateError> {
        self.sandbox.check(&self.question(None))
    }

    fn question<'a>(&'a self, rendering: Option<RenderArguments<'a>>) -> Question<'a> {
        Question { source: Cow::Borrowed(&self.source), tokens: Cow::Borrowed(&self.tokens), rendering }
    }
}

impl RenderTemplate for SandboxedTemplate {
    fn render_at(
        &self,
        messages: &[Value],
        prompt: GenerationPrompt,
        extra: &Map<String, Value>,
        now: SystemTime,
    ) -> Result<String, TemplateError> {
        let (messages, extra) = (Cow::Borrowed(messages), Cow::Borrowed(extra));
        self.sandbox.render(&self.question(Some(RenderArguments { messages, prompt, extra, now })))
    }
}

/// A template, and what it renders; without that, it is only compiled.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Question<'a> {
    source: Cow<'a, str>,
    tokens: Cow<'a, TemplateTokens>,
    rendering: Option<RenderArguments<'a>>,
}

/// Arguments of [`RenderTemplate::render_at`] for the process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RenderArguments<'a> {
    messages: Cow<'a, [Value]>,
    prompt: GenerationPrompt,
    extra: Cow<'a, Map<String, Value>>,
    now: SystemTime,
}

/// Rendering of templates; an answer is the rendered text.
#[derive(Debug)]
pub(super) struct Render;

impl Work for Render {
    const ARGUMENT: &'static str = "template-renderer";
    const NAME: &'static std::ffi::CStr = c"templates";
    // As the threads that wait for it.
    const NICENESS: i32 = 10;

    type Setup = ();
    type Question = Question<'static>;
    type Answer = Result<String, TemplateError>;

    fn new((): &()) -> Self {
        Self
    }

    fn answer(
        &self,
        Question { source, tokens, rendering }: Question<'static>,
    ) -> Result<String, TemplateError> {
        let template = ChatTemplate::new(&source, tokens.into_owned(), Limits::default())?;
        let Some(RenderArguments { messages, prompt, extra, now }) = rendering else {
            return Ok(String::new());
        };
        template.render_at(&messages, prompt, &extra, now)
    }
}
