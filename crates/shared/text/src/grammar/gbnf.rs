//! Converts grammars in the Backus-Naur form of llama.cpp (GBNF), which vLLM also takes, to Lark.
//!
//! Rules that do not lead to a recursive rule are written as terminals. Each terminal is one expression to
//! the library, so nothing depends on where its longest match ends.

use std::{collections::BTreeMap, fmt::Write as _, iter::Peekable, str::Chars};

use super::lark_string;

const ROOT: &str = "root";

/// Why a text is not a grammar in this form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GbnfError {
    /// The text lacks a required element at this position.
    #[error("line {line}: {wanted} is needed")]
    Wanted {
        /// Line number from 1.
        line: usize,
        /// Description of the expected element.
        wanted: &'static str,
    },
    /// A rule is used but not defined.
    #[error("there is no rule '{0}'; write `{0} ::= ...`")]
    NoRule(String),
    /// A rule is defined twice.
    #[error("there are two rules '{0}'; join them with `|`")]
    TwoRules(String),
}

pub(super) fn lark(source: &str) -> Result<String, GbnfError> {
    let rules = Parser::new(source).rules()?;
    let root = *rules.numbers.get(ROOT).ok_or_else(|| GbnfError::NoRule(ROOT.to_owned()))?;
    let regular = rules.regular();
    let name = |rule: usize| if regular[rule] { format!("R{rule}") } else { format!("r{rule}") };
    let mut lark = format!("start: {}\n", name(root));
    for (rule, body) in rules.bodies.iter().enumerate() {
        let _ = write!(lark, "{}: ", name(rule));
        write_choice(&mut lark, body.as_ref().unwrap_or(&Vec::new()), &name);
        lark.push('\n');
    }
    Ok(lark)
}

/// Alternatives, each of which is a sequence of parts.
type Choice = Vec<Vec<Part>>;

struct Part {
    atom: Atom,
    /// Repetition as Lark writes it, or empty.
    times: String,
}

enum Atom {
    Text(String),
    /// A regular expression for one character.
    Character(String),
    Rule(usize),
    Group(Choice),
}

#[derive(Default)]
struct Rules {
    numbers: BTreeMap<String, usize>,
    /// Bodies by rule number; `None` for a rule that is used but not yet defined.
    bodies: Vec<Option<Choice>>,
}

impl Rules {
    fn number(&mut self, name: &str) -> usize {
        if let Some(&number) = self.numbers.get(name) {
            return number;
        }
        self.numbers.insert(name.to_owned(), self.bodies.len());
        self.bodies.push(None);
        self.bodies.len() - 1
    }

    fn define(&mut self, name: String, body: Choice) -> Result<(), GbnfError> {
        let number = self.number(&name);
        match self.bodies[number].replace(body) {
            None => Ok(()),
            Some(_) => Err(GbnfError::TwoRules(name)),
        }
    }

    /// Returns which rules are not recursive: a fixed point over rules whose parts are all known to be
    /// regular.
    fn regular(&self) -> Vec<bool> {
        let mut regular = vec![false; self.bodies.len()];
        loop {
            let more: Vec<usize> = (0..regular.len())
                .filter(|&rule| !regular[rule])
                .filter(|&rule| self.bodies[rule].as_ref().is_some_and(|body| is_regular(body, &regular)))
                .collect();
            if more.is_empty() {
                return regular;
            }
            more.into_iter().for_each(|rule| regular[rule] = true);
        }
    }
}

fn is_regular(choice: &Choice, rules: &[bool]) -> bool {
    choice.iter().flatten().all(|part| match &part.atom {
        Atom::Text(_) | Atom::Character(_) => true,
        Atom::Rule(rule) => rules[*rule],
        Atom::Group(choice) => is_regular(choice, rules),
    })
}

fn write_choice(lark: &mut String, choice: &Choice, name: &impl Fn(usize) -> String) {
    for (way, parts) in choice.iter().enumerate() {
        lark.push_str(if way > 0 { " | " } else { "" });
        if parts.is_empty() {
            lark.push_str("\"\"");
        }
        for (index, part) in parts.iter().enumerate() {
            lark.push_str(if index > 0 { " " } else { "" });
            match &part.atom {
                Atom::Text(text) => lark.push_str(&lark_string(text)),
                Atom::Character(expression) => _ = write!(lark, "/{expression}/"),
                Atom::Rule(rule) => lark.push_str(&name(*rule)),
                Atom::Group(choice) => {
                    lark.push('(');
                    write_choice(lark, choice, name);
                    lark.push(')');
                }
            }
            lark.push_str(&part.times);
        }
    }
}

/// Reads a grammar whose bracket depth was already checked.
struct Parser<'a> {
    rest: Peekable<Chars<'a>>,
    line: usize,
    rules: Rules,
}

impl<'a> Parser<'a> {
    fn new(source: &'a str) -> Self {
        Self { rest: source.chars().peekable(), line: 1, rules: Rules::default() }
    }

    fn rules(mut self) -> Result<Rules, GbnfError> {
        self.skip();
        let mut next = self.name();
        while let Some(name) = next {
            self.definition()?;
            let (body, following) = self.choice()?;
            self.rules.define(name, body)?;
            next = following;
        }
        if self.rest.peek().is_some() {
            return Err(self.wanted("a rule (`name ::= ...`), or the end,"));
        }
        match self.rules.numbers.iter().find(|(_, number)| self.rules.bodies[**number].is_none()) {
            None => Ok(self.rules),
            Some((name, _)) => Err(GbnfError::NoRule(name.clone())),
        }
    }

    /// Reads alternatives up to a bracket, the end, or the name of the next rule.
    fn choice(&mut self) -> Result<(Choice, Option<String>), GbnfError> {
        let mut choice = vec![Vec::new()];
        loop {
            let atom = match self.rest.peek() {
                Some('|') => {
                    self.next();
                    choice.push(Vec::new());
                    self.skip();
                    continue;
                }
                Some('"') => Atom::Text(self.text()?),
                Some('[') => Atom::Character(self.class()?),
                Some('.') => {
                    self.next();
                    Atom::Character("(?s:.)".to_owned())
                }
                Some('(') => Atom::Group(self.group()?),
                Some(_) => match self.name() {
                    None => return Ok((choice, None)),
                    Some(name) if self.defines() => return Ok((choice, Some(name))),
                    Some(name) => Atom::Rule(self.rules.number(&name)),
                },
                None => return Ok((choice, None)),
            };
            let times = self.times()?;
            if let Some(way) = choice.last_mut() {
                way.push(Part { atom, times });
            }
            self.skip();
        }
    }

    fn group(&mut self) -> Result<Choice, GbnfError> {
        self.next();
        self.skip();
        let (choice, next) = self.choice()?;
        if next.is_some() || self.next() != Some(')') {
            return Err(self.wanted("`)`"));
        }
        Ok(choice)
    }

    /// Reads a name and the space after it.
    fn name(&mut self) -> Option<String> {
        let mut name = String::new();
        let is_of_name = |next: &char| next.is_ascii_alphanumeric() || matches!(next, '-' | '_');
        while let Some(next) = self.rest.next_if(is_of_name) {
            name.push(next);
        }
        // A repetition operator stands directly after the name.
        if !matches!(self.rest.peek(), Some('*' | '+' | '?' | '{')) {
            self.skip();
        }
        (!name.is_empty()).then_some(name)
    }

    fn defines(&mut self) -> bool {
        self.rest.peek() == Some(&':')
    }

    fn definition(&mut self) -> Result<(), GbnfError> {
        for sign in "::=".chars() {
            if self.next() != Some(sign) {
                return Err(self.wanted("`::=`"));
            }
        }
        self.skip();
        Ok(())
    }

    fn times(&mut self) -> Result<String, GbnfError> {
        match self.rest.peek() {
            Some(&sign @ ('*' | '+' | '?')) => {
                self.next();
                Ok(sign.to_string())
            }
            Some('{') => {
                let mut times = String::new();
                while let Some(next) = self.rest.next_if(|next| matches!(next, '{' | ',' | ' ' | '0'..='9')) {
                    times.push(next);
                }
                if self.next() != Some('}') {
                    return Err(self.wanted("`{n}`, `{n,}` or `{n,m}`"));
                }
                times.push('}');
                Ok(times)
            }
            _ => Ok(String::new()),
        }
    }

    fn text(&mut self) -> Result<String, GbnfError> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.escaped()?),
                Some(character) if character != '\n' => text.push(character),
                _ => return Err(self.wanted("`\"` at the end of a text")),
            }
        }
    }

    /// Reads a character class and writes each character as its code, because the two syntaxes escape
    /// different characters.
    fn class(&mut self) -> Result<String, GbnfError> {
        self.next();
        let mut class = String::from("[");
        if self.rest.next_if_eq(&'^').is_some() {
            class.push('^');
        }
        loop {
            let character = match self.next() {
                Some(']') if class.len() > 2 => return Ok(class + "]"),
                Some('\\') => self.escaped()?,
                Some('-') if is_behind_one(&class) && self.rest.peek() != Some(&']') => {
                    class.push('-');
                    continue;
                }
                Some(character) if !matches!(character, '\n' | ']') => character,
                _ => return Err(self.wanted("`]` at the end of a class, and something in it,")),
            };
            let _ = write!(class, r"\x{{{:X}}}", u32::from(character));
        }
    }

    fn escaped(&mut self) -> Result<char, GbnfError> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(sign) if sign.is_ascii_punctuation() => return Ok(sign),
            _ => return Err(self.wanted("`\\n`, `\\r`, `\\t`, `\\xHH`, `\\uHHHH` or a sign behind `\\`")),
        };
        let mut number = 0;
        for _ in 0..digits {
            let digit = self.next().and_then(|digit| digit.to_digit(16));
            number = number << 4 | digit.ok_or_else(|| self.wanted("a hexadecimal digit"))?;
        }
        char::from_u32(number).ok_or_else(|| self.wanted("the code point of a character"))
    }

    fn skip(&mut self) {
        while let Some(&next) = self.rest.peek() {
            if next == '#' {
                while self.rest.next_if(|next| *next != '\n').is_some() {}
            } else if next.is_whitespace() {
                self.next();
            } else {
                return;
            }
        }
    }

    fn next(&mut self) -> Option<char> {
        let next = self.rest.next();
        self.line += usize::from(next == Some('\n'));
        next
    }

    fn wanted(&self, wanted: &'static str) -> GbnfError {
        GbnfError::Wanted { line: self.line, wanted }
    }
}

/// Whether a class so far ends with a character that a range may begin with.
fn is_behind_one(class: &str) -> bool {
    let Some((before, _)) = class.rsplit_once('\\') else { return false };
    class.ends_with('}') && !before.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_regular_becomes_a_terminal_and_the_rest_rules() {
        let source = "# sums\nroot ::= sum \"\\n\"\nsum ::= term (\" + \" term)*\n  | \"-\" sum\nterm ::= [0-9a\\-]{1,3} | [^\\]\"-]? | .\n";
        let expected = "start: r1\n\
                        r0: R2 (\" + \" R2)* | \"-\" r0\n\
                        r1: r0 \"\\n\"\n\
                        R2: /[\\x{30}-\\x{39}\\x{61}\\x{2D}]/{1,3} | /[^\\x{5D}\\x{22}\\x{2D}]/? | /(?s:.)/\n";
        assert_eq!(lark(source).unwrap(), expected);
    }

    #[test]
    fn what_is_wrong_is_told_by_its_line_or_name() {
        for (source, cause) in [
            ("root ::= \"a", "line 1"),
            ("root ::= \"a\"\nb : \"c\"", "line 2"),
            ("root ::= (\"a\"\nb ::= \"c\"", "`)`"),
            ("root ::= [a", "`]`"),
            ("root ::= []", "`]`"),
            ("root ::= \"a\"{x}", "{n,m}"),
            ("root ::= \"\\uD800\"", "character"),
            ("root ::= \"a\" )", "the end"),
            ("root ::= other", "no rule 'other'"),
            ("rot ::= \"a\"", "no rule 'root'"),
            ("root ::= \"a\"\nroot ::= \"b\"", "two rules 'root'"),
            ("", "no rule 'root'"),
        ] {
            let error = lark(source).unwrap_err().to_string();
            assert!(error.contains(cause), "{source:?}: {error}");
        }
    }
}
