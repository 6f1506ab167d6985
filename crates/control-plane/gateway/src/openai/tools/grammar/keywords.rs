//! Grammar of arguments that are written one by one, each with its name, in the order of the schema. The
//! pythonic format writes `key=value` with JSON values, which such models also read and write. The tagged
//! format writes strings without quotes.

use serde_json::{Map, Value, json};
use text::grammar::{Enforcement, lark_string};

use super::{
    super::{format::ToolCallFormat, parameter_kinds::JsonKinds, tool_params::Tool},
    CallsError, GrammarRules, parameters_of, without,
};

/// Keywords permitted in a schema of arguments.
const OF_ARGUMENTS: [&str; 9] = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "title",
    "description",
    "$schema",
];
/// Keywords permitted in the schema of an unquoted string.
const OF_TEXTS: [&str; 12] = [
    "type",
    "enum",
    "const",
    "minLength",
    "maxLength",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "$comment",
    "$defs",
];
/// Text that ends a value in tags.
const END_OF_VALUE: &str = "\n</parameter>\n";

impl GrammarRules {
    /// Returns the text before the value of `key`, and the text between two arguments.
    fn around(&self, key: &str) -> (String, &'static str) {
        match self.format {
            ToolCallFormat::Qwen3Coder => (format!("<parameter={key}>\n"), ""),
            _ => (format!("{key}="), ", "),
        }
    }

    pub(super) fn any_keywords(&mut self, rule: &str) -> Result<(), CallsError> {
        let value = format!("{rule}_value");
        if self.format == ToolCallFormat::Qwen3Coder {
            self.add(rule, &format!("(\"<parameter=\" /[^>\\n]+/ \">\\n\" {value})*"));
            self.text(&value, "/(?s:.*)/");
        } else {
            self.add(rule, &format!("({rule}_one (\", \" {rule}_one)*)?"));
            self.add(&format!("{rule}_one"), &format!("/[A-Za-z_][A-Za-z0-9_]*/ \"=\" {value}"));
            self.json(&value, &json!({}), ("tools", Enforcement::Strict))?;
        }
        Ok(())
    }

    pub(super) fn keywords(&mut self, rule: &str, tool: &Tool) -> Result<(), CallsError> {
        let no_list = || CallsError::NoPlainList { name: tool.name.clone() };
        let object = tool.parameters.as_object().ok_or_else(no_list)?;
        let is_plain = object.keys().all(|key| OF_ARGUMENTS.contains(&key.as_str()));
        if !is_plain || object.get("type") != Some(&json!("object")) {
            return Err(no_list());
        }
        let none = Map::new();
        let properties =
            object.get("properties").map_or(Some(&none), Value::as_object).ok_or_else(no_list)?;
        let required = object.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (index, (key, schema)) in properties.iter().enumerate() {
            let is_optional = !required.iter().any(|name| name == key);
            let value = format!("{rule}_value_{index}");
            self.value(&value, (tool, key.as_str()), schema)?;
            let (before, between) = self.around(key);
            let one = format!("{} {value} {rule}_behind_{}", lark_string(&before), index + 1);
            let skip =
                |to: &str| if is_optional { format!(" | {rule}_{to}_{}", index + 1) } else { String::new() };
            self.add(&format!("{rule}_from_{index}"), &format!("{one}{}", skip("from")));
            let behind = format!("{} {one}{}", lark_string(between), skip("behind"));
            self.add(&format!("{rule}_behind_{index}"), &behind);
        }
        for last in ["from", "behind"] {
            self.add(&format!("{rule}_{last}_{}", properties.len()), "\"\"");
        }
        self.add(rule, &format!("{rule}_from_0"));
        Ok(())
    }

    /// Adds a value that matches `schema`, with the text that ends it.
    fn value(&mut self, rule: &str, (tool, key): (&Tool, &str), schema: &Value) -> Result<(), CallsError> {
        let (field, enforcement) = parameters_of(tool);
        let (field, whole) =
            (format!("{field}/properties/{key}"), with_definitions(schema, &tool.parameters));
        if self.format != ToolCallFormat::Qwen3Coder {
            return Ok(self.json(rule, &whole, (&field, enforcement))?);
        }
        let takes = JsonKinds::of(schema, &tool.parameters);
        if !takes.hold_texts() {
            let json = format!("{rule}_json");
            self.json(&json, &whole, (&field, enforcement))?;
            self.add(rule, &format!("{json} {}", lark_string(END_OF_VALUE)));
            return Ok(());
        }
        let refused = |keyword: &str| CallsError::NoText {
            name: tool.name.clone(),
            parameter: key.to_owned(),
            keyword: keyword.to_owned(),
        };
        let none = Map::new();
        let said = said_of_text(schema, &tool.parameters).as_object().unwrap_or(&none);
        let unknown = said.keys().find(|keyword| !OF_TEXTS.contains(&keyword.as_str()));
        if let Some(keyword) = unknown {
            return Err(refused(keyword));
        }
        if !takes.are_texts() {
            return Err(refused(if said.contains_key("enum") { "enum" } else { "type" }));
        }
        let choices = said.get("enum").and_then(Value::as_array).cloned();
        let is_end = |choice: &Value| choice.as_str().is_some_and(|text| text.contains(END_OF_VALUE.trim()));
        if choices.iter().flatten().chain(said.get("const")).any(is_end) {
            return Err(refused(if choices.is_some() { "enum" } else { "const" }));
        }
        if let Some(choices) = choices.or_else(|| said.get("const").map(|only| vec![only.clone()])) {
            let written = |choice: &Value| lark_string(choice.as_str().unwrap_or("null"));
            let mut choices: Vec<String> = choices.iter().map(written).collect();
            choices.extend((takes != JsonKinds::TEXT).then(|| lark_string("null")));
            self.add(rule, &format!("({}) {}", choices.join(" | "), lark_string(END_OF_VALUE)));
            return Ok(());
        }
        let bound = |keyword| said.get(keyword).and_then(Value::as_u64);
        let most = bound("maxLength").map_or_else(String::new, |most| most.to_string());
        let length = match (bound("minLength"), most.as_str()) {
            (None | Some(0), "") => "*".to_owned(),
            (least, most) => format!("{{{},{most}}}", least.unwrap_or(0)),
        };
        self.text(rule, &format!("/(?s:.{length})/"));
        Ok(())
    }

    /// Adds an unquoted string with its end; readers stop at the closing tag, so the string cannot contain
    /// it.
    fn text(&mut self, rule: &str, text: &str) {
        let text = without(text, Some(END_OF_VALUE.trim()));
        self.add(&format!("{rule}[suffix={}]", lark_string(END_OF_VALUE)), &text);
    }
}

/// Returns `schema` with the definitions of `root`.
fn with_definitions(schema: &Value, root: &Value) -> Value {
    let mut schema = schema.clone();
    for key in ["$defs", "definitions"] {
        if let (Some(map), Some(all)) = (schema.as_object_mut(), root.get(key)) {
            map.entry(key).or_insert_with(|| all.clone());
        }
    }
    schema
}

/// Returns the string schema that `schema` refers to, or the only string alternative beside `null`.
fn said_of_text<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let target = |schema: &'a Value| {
        let to = schema.get("$ref").and_then(Value::as_str).and_then(|to| to.strip_prefix('#'));
        to.and_then(|at| root.pointer(at)).unwrap_or(schema)
    };
    let schema = target(schema);
    let choices = ["anyOf", "oneOf"].into_iter().find_map(|key| schema.get(key)?.as_array());
    let mut texts = choices.into_iter().flatten().filter(|choice| JsonKinds::of(choice, root).hold_texts());
    match (texts.next(), texts.next()) {
        (Some(only), None) => target(only),
        _ => schema,
    }
}
