//! Resolves `[base][:adapter]` to a served model. Instead of one adapter, several may be given with
//! weights: `a:0.7+b:0.3`.

use crate::{
    client::ServedModel,
    exit::{Exit, Explain},
};

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TargetError {
    #[error("the gateway serves no model")]
    Nothing,
    #[error("`{name}` is not served; served models are {served}")]
    Unknown {
        /// Target that was requested.
        name: String,
        /// Names of the served models.
        served: String,
    },
}

impl Explain for TargetError {
    fn exit(&self) -> Exit {
        Exit::NotFound
    }

    fn next(&self) -> Option<String> {
        Some("holobiont ls".into())
    }
}

/// Returns the `model` field of requests. A name without a colon may be a base or an adapter, as in any
/// request.
pub(crate) fn choose(target: &str, served: &[ServedModel]) -> Result<String, TargetError> {
    let unknown = || TargetError::Unknown {
        name: target.to_owned(),
        served: served.iter().map(|model| model.id.as_str()).collect::<Vec<_>>().join(", "),
    };
    if served.iter().any(|model| model.id == target) {
        return Ok(target.to_owned());
    }
    let bases = served.iter().filter(|model| !model.is_adapter()).map(|model| model.id.as_str());
    let behind = bases.chain([""]).find_map(|base| target.strip_prefix(base)?.strip_prefix(':'));
    if let Some(sum) = [behind, Some(target)].into_iter().flatten().find(|text| is_sum(text, served)) {
        return Ok(sum.to_owned());
    }
    let (base, adapter) = target.split_once(':').unwrap_or((target, ""));
    let is_base = |model: &&ServedModel| !model.is_adapter() && (base.is_empty() || model.id == base);
    let found = match adapter {
        "" if served.is_empty() => return Err(TargetError::Nothing),
        "" => served.iter().find(is_base),
        _ => served.iter().find(|model| {
            model.id == adapter
                && model.is_adapter()
                && (base.is_empty() || model.parent.as_deref() == Some(base))
        }),
    };
    found.map(|model| model.id.clone()).ok_or_else(unknown)
}

/// True if `text` is a merged adapter of served adapters.
fn is_sum(text: &str, served: &[ServedModel]) -> bool {
    let name = |part: &'_ str| match part.rsplit_once(':') {
        Some((name, weight)) if weight.parse::<f32>().is_ok() => name.to_owned(),
        _ => part.to_owned(),
    };
    let names: Vec<String> = text.split('+').map(name).collect();
    let is_served = |name: &String| served.iter().any(|model| model.is_adapter() && model.id == *name);
    (names.len() > 1 || names[0] != text) && names.iter().all(is_served)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served() -> Vec<ServedModel> {
        serde_json::from_value(serde_json::json!([
            {"id": "smol"}, {"id": "pirate", "parent": "smol"}, {"id": "haiku", "parent": "smol"}
        ]))
        .unwrap()
    }

    #[test]
    fn every_way_to_write_a_target_is_understood() {
        let cases = [
            ("", "smol"),
            ("smol", "smol"),
            (":pirate", "pirate"),
            ("smol:haiku", "haiku"),
            ("haiku", "haiku"),
            ("pirate:0.7+haiku", "pirate:0.7+haiku"),
            (":pirate:0.7+haiku:-1", "pirate:0.7+haiku:-1"),
            ("smol:pirate+haiku", "pirate+haiku"),
            (":pirate:0.5", "pirate:0.5"),
        ];
        for (target, model) in cases {
            assert_eq!(choose(target, &served()).as_deref(), Ok(model), "{target:?}");
        }
    }

    #[test]
    fn an_unknown_adapter_never_becomes_the_base() {
        for target in
            [":nobody", "smol:nobody", "other:pirate", "nobody", ":smol", "pirate+nobody", ":pirate:x+haiku"]
        {
            let error = choose(target, &served()).unwrap_err();
            assert_eq!(error.exit(), Exit::NotFound, "{target:?}");
            assert!(error.to_string().contains("pirate"), "{error}");
        }
        assert_eq!(choose("", &[]), Err(TargetError::Nothing));
    }
}
