//! Chat templates: a model author's programs over untrusted messages.

use super::{Maker, Seed};
use crate::parts::join;

const ENDLESS: &str = "CVE-2026-115911 (endless rendering)";
const CODE: &str = "CVE-2024-34359, CVE-2024-2952 (code in templates)";

/// Class of seeds that are not mutated, because the engine bounds repetition only at a hundred million.
pub(super) const REPETITION: &str = "repetition";

pub(super) fn templates() -> Vec<Seed> {
    const MESSAGES: &str = r#"[{"role":"user","content":"Hello"}]"#;
    let mut make = Maker::new("template");
    let with = |template: &str| join(&[template.as_bytes(), MESSAGES.as_bytes()]);
    make.valid(
        "a template",
        with("{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}"),
    );
    let mut endless = |name, template: &str, why| make.refused(name, ENDLESS, with(template), why);
    endless(
        "nested loops",
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "steps",
    );
    endless("range(10**9)", "{% for a in range(10**9) %}{% endfor %}", "range");
    endless("recursion by macros", "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "recursion");
    let line = "a line of output ".repeat(40);
    let output = ["{% for a in range(90000) %}{{ '", &line, "' }}{% endfor %}"].concat();
    endless("output without end", &output, "bytes of output");
    endless(
        "brackets 10,000 deep",
        &["{{ ", &"(".repeat(10_000), "1", &")".repeat(10_000), " }}"].concat(),
        "",
    );
    endless("10,000 blocks in one another", &"{% if true %}".repeat(10_000), "");
    endless(
        "lists 10,000 deep",
        &["{{ ", &"[".repeat(10_000), "]".repeat(10_000).as_str(), " }}"].concat(),
        "",
    );
    endless("an unfinished tag", "{% for", "cannot be compiled");
    // The engine refuses these; its limit is a hundred million, so they are unsuitable for mutations.
    make.refused("a list of 10**9", REPETITION, with("{% set a = [0] * 10**9 %}{{ a }}"), "too large");
    make.refused("a text of 10**9", REPETITION, with("{{ 'a' * 10**9 }}"), "too large");
    let mut code = |name, template: &str| make.bounded(name, CODE, with(template));
    code("Python's classes", "{{ ''.__class__.__mro__[1].__subclasses__() }}");
    code("Python's globals", "{{ messages.__init__.__globals__ }}");
    code("another template", "{% include '/etc/passwd' %}");
    code("an import", "{% import 'os' as os %}{{ os.popen('id') }}");
    let nested = join(&[b"{{ messages }}", format!("[{}]", "[".repeat(100_000)).as_bytes()]);
    make.refused("messages 100,000 deep", "I3", nested, "recursion limit");
    make.seeds
}
