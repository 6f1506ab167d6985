//! Check of the configured draft model.

use std::path::Path;

use model_files::{model_files::ModelFiles, token_list::TokenList};
use settings::DraftChoice;

use crate::{deployment::config::DeploymentConfig, home::HomeDirectory, models, terminal::findings::Finding};

const NAME: &str = "[speculation] draft";

/// Checks that the draft model, if configured, exists and has the base's vocabulary.
pub(super) fn model(config: &DeploymentConfig, home: &HomeDirectory) -> Option<Finding> {
    let Some(DraftChoice::Model(path)) = &config.speculation.draft else { return None };
    let base = models::find(config.model.name.as_deref(), home).ok();
    Some(match compared(path, base.as_deref()) {
        Ok(()) => Finding::ok(NAME, path.display().to_string()),
        Err(why) => {
            let found = format!("{}: {why}", path.display());
            Finding::fail(NAME, found, "name a smaller model of the base's family, or set draft = \"auto\"")
        }
    })
}

/// Compares the vocabularies. A missing base is reported by another finding.
fn compared(draft: &Path, base: Option<&Path>) -> Result<(), String> {
    let tokens = |path: &Path| {
        let files = ModelFiles::at(path).map_err(|error| error.to_string())?;
        TokenList::of(&files).map_err(|error| error.to_string())
    };
    let own = tokens(draft)?;
    match base.map(tokens) {
        Some(Ok(base)) => own.agrees_with(&base).map_err(|error| error.to_string()),
        Some(Err(_)) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::findings::Health;

    #[test]
    fn a_model_that_is_to_draft_is_looked_for_and_words_are_none() {
        let finding = |draft: &str| {
            let config = toml::from_str(&format!("speculation.draft = '{draft}'")).unwrap();
            model(&config, &HomeDirectory::from_environment())
        };
        assert!(finding("auto").is_none() && finding("self").is_none());
        let missing = finding("./nowhere.gguf").unwrap();
        assert!(missing.health == Health::Fail && missing.found.contains("nowhere.gguf"), "{missing:?}");
    }
}
