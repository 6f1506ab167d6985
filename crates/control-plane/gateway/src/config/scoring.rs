//! Settings of the scoring routes: tokens that classify, and the prompt of a query and a document.

use std::{fs, sync::Arc};

use text::pair_template::{MAX_TEMPLATE_BYTES, PairTemplate};

use super::{GatewayConfigError, ScoringArgs};

/// Maximum number of tokens whose logits classify a text.
pub const MAX_CLASSES: usize = 256;

/// Tokens and prompt of scoring requests that name none.
#[derive(Debug, Clone, Default)]
pub struct ScoringDefaults {
    /// Tokens whose logits after a prompt are its classes; none scores by embeddings.
    pub tokens: Vec<String>,
    /// Prompt of a query and a document; `None` for that of Qwen3-Reranker.
    pub template: Option<Arc<PairTemplate>>,
}

impl ScoringDefaults {
    pub(super) fn read(args: &ScoringArgs) -> Result<Self, GatewayConfigError> {
        let tokens = args.classifier_from_token.clone();
        if tokens.len() > MAX_CLASSES {
            return Err(GatewayConfigError::TooManyTokens(tokens.len()));
        }
        let template = args.score_template.as_ref().map(|path| {
            let failed = |reason| GatewayConfigError::ScoreTemplateFile { path: path.clone(), reason };
            // A file that is too long is refused by its length, so its content is not needed.
            let length = fs::metadata(path).map_err(failed)?.len();
            PairTemplate::check_length(usize::try_from(length).unwrap_or(MAX_TEMPLATE_BYTES + 1))?;
            let source = fs::read_to_string(path).map_err(failed)?;
            Ok::<_, GatewayConfigError>(Arc::new(PairTemplate::parse(&source)?))
        });
        Ok(Self { tokens, template: template.transpose()? })
    }
}
