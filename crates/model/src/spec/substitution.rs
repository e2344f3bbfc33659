//! Puts variables into a spec's text: `${NAME}` and `${NAME:-default}`, as in compose files. Keeps
//! numbers and words of `env`, `argv` and `dask.config` as they were written, which YAML would
//! change (`1.10`, `0x10`, `true`), and gives a name in `env` without a value that of the caller's
//! environment.
//!
//! Reads no environment; the caller looks the names up.
//!
//! *Invariant:* the value of a variable is one text. It never adds keys, items or lines.

use std::ffi::OsString;

use super::{Problem, SpecError};
use crate::text::{self, Document, Style};

/// Looks a variable up by its name.
type Lookup<'a> = dyn Fn(&str) -> Option<OsString> + 'a;

/// Puts variables into every scalar, and makes the values in `env`, `argv` and `dask.config` texts.
/// Errors have their places in `text`.
///
/// # Errors
/// If a variable is not set and has no default, or a `${` is not closed or names nothing.
pub(super) fn apply(
    document: &mut Document<'_>,
    text: &str,
    origin: &str,
    lookup: &Lookup<'_>,
) -> Result<(), SpecError> {
    document.scalars(|path, content, style| {
        let written = !content.is_empty();
        let changed =
            fill(content, style, lookup).and_then(|()| keep(path, content, style, lookup));
        changed.map_err(|Fault(message, hint)| {
            let place = text::find(text, path, 1);
            let place = place.map(|place| if written { place.value } else { place.key });
            let problem = Box::new(Problem::Variable { message, hint });
            SpecError { place, ..SpecError::new(origin, path.to_owned(), problem) }
        })
    })
}

/// What is wrong, and what to do.
struct Fault(String, &'static str);

/// Puts variables into a scalar.
fn fill(content: &mut String, style: &mut Style, lookup: &Lookup<'_>) -> Result<(), Fault> {
    if !content.contains('$') {
        return Ok(());
    }
    let filled = filled(content, lookup)?;
    if filled == *content {
        return Ok(());
    }
    if *style == Style::Block {
        return Err(Fault(
            "variables are not put into texts of several lines".to_owned(),
            "put the text into quotes",
        ));
    }
    if !is_plain(&filled) {
        *style = Style::Quoted;
    }
    *content = filled;
    Ok(())
}

/// Keeps a scalar in `env`, `argv` or `dask.config` as it is written, and inherits a name in `env`
/// without a value.
fn keep(
    path: &str,
    content: &mut String,
    style: &mut Style,
    lookup: &Lookup<'_>,
) -> Result<(), Fault> {
    if *style != Style::Plain {
        return Ok(());
    }
    let empty = matches!(content.as_str(), "" | "~" | "null");
    match path.rsplit_once(".env.") {
        Some((_, name)) if empty => {
            *content = looked_up(name, lookup)?.ok_or_else(|| unset(name))?;
        }
        Some(_) => {}
        // Dask reads the texts of its configuration as YAML reads these words.
        None if (is_argument(path) || path.starts_with("dask.config.")) && !empty => {}
        None => return Ok(()),
    }
    *style = Style::Quoted;
    Ok(())
}

/// Whether a value is an item of a command line.
fn is_argument(path: &str) -> bool {
    let list = path.strip_suffix(']').and_then(|path| path.rsplit_once('['));
    list.is_some_and(|(list, _)| list.ends_with("argv"))
}

/// Whether a text can stand without quotes, and thus be a number or a word.
fn is_plain(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '+' | '-');
    text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/') && text.chars().all(plain)
}

/// A text with the values of its variables.
fn filled(text: &str, lookup: &Lookup<'_>) -> Result<String, Fault> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some(after) = after.strip_prefix('{') {
            let (inside, after) = after.split_once('}').ok_or_else(|| {
                Fault("a ${ is not closed".to_owned(), "write $${ for a plain ${")
            })?;
            out.push_str(&value(inside, lookup)?);
            rest = after;
        } else {
            // `$NAME` is for the shell that the program may be.
            out.push('$');
            rest = after;
        }
    }
    out.push_str(rest);
    Ok(out)
}

fn value(inside: &str, lookup: &Lookup<'_>) -> Result<String, Fault> {
    let end = inside.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let (name, rest) = inside.split_at(end.unwrap_or(inside.len()));
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(wrong(inside));
    }
    match (looked_up(name, lookup)?, rest) {
        (Some(value), "") => Ok(value),
        (None, "") => Err(unset(name)),
        (found, rest) => {
            if let Some(default) = rest.strip_prefix(":-") {
                let found = found.filter(|value| !value.is_empty());
                Ok(found.unwrap_or_else(|| default.to_owned()))
            } else if let Some(default) = rest.strip_prefix('-') {
                Ok(found.unwrap_or_else(|| default.to_owned()))
            } else {
                Err(wrong(inside))
            }
        }
    }
}

fn looked_up(name: &str, lookup: &Lookup<'_>) -> Result<Option<String>, Fault> {
    let no_text = |_| {
        let message = format!("the variable {name} is not UTF-8, as a spec is");
        Fault(message, "set it to a text in UTF-8")
    };
    lookup(name).map(OsString::into_string).transpose().map_err(no_text)
}

fn unset(name: &str) -> Fault {
    Fault(format!("the variable {name} is not set"), "set it, or give a default: ${NAME:-default}")
}

fn wrong(inside: &str) -> Fault {
    let shown: String = inside.chars().take(40).collect();
    Fault(
        format!("'${{{shown}}}' names no variable"),
        "write ${NAME}, ${NAME:-default}, or $${ for a plain ${",
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn known(name: &str) -> Option<OsString> {
        match name {
            "N" => Some("4".into()),
            "EMPTY" => Some(OsString::new()),
            "WILD" => Some("a: b\n# \"c\" \\ {[".into()),
            "LATIN" => Some(OsString::from_vec(b"caf\xe9".to_vec())),
            _ => None,
        }
    }

    /// What a text says once its variables are in it.
    fn put(text: &str) -> Result<serde_json::Value, String> {
        put_with(text, &known)
    }

    fn put_with(text: &str, lookup: &Lookup<'_>) -> Result<serde_json::Value, String> {
        let mut document = Document::parse(text).map_err(|error| error.to_string())?;
        apply(&mut document, text, "test", lookup).map_err(|error| error.to_string())?;
        document.read().map_err(|(error, _)| error.to_string())
    }

    #[test]
    fn variables_stand_where_they_are_named() {
        let a = |text: &str| put(&format!("a: {text}")).map(|mut all| all["a"].take());
        assert_eq!(a("${N}"), Ok(json!(4)));
        assert_eq!(a("\"${N}\""), Ok(json!("4")));
        assert_eq!(a("x${N}y$z"), Ok(json!("x4y$z")));
        assert_eq!(a("${M:-7}"), Ok(json!(7)));
        assert_eq!(a("${EMPTY:-7}"), Ok(json!(7)));
        assert_eq!(a("${EMPTY-7}"), Ok(json!("")));
        assert_eq!(a("${M-}"), Ok(json!("")));
        assert_eq!(a("$${N} $$ $"), Ok(json!("${N} $ $")));
        // Braces inside of brackets are YAML's own, so quotes are needed there.
        assert_eq!(a("['${N}', b]"), Ok(json!(["4", "b"])));
        // An anchor stays an anchor.
        assert_eq!(put("a: &n ${N}\nb: *n"), Ok(json!({"a": 4, "b": 4})));
    }

    /// A spec's variables and its program.
    fn read(text: &str) -> Result<(Vec<String>, Vec<String>), String> {
        let spec = super::super::parse_with(&format!("version: 1\n{text}"), "test", &known);
        let spec = spec.map_err(|error| error.to_string())?;
        let env = spec.worker.env.unwrap_or_default().into_iter();
        let env = env.map(|(name, value)| format!("{name}={value}")).collect();
        Ok((env, spec.command.argv.unwrap_or_default()))
    }

    fn variables(text: &str) -> Vec<String> {
        read(text).expect(text).0
    }

    #[test]
    fn env_and_argv_stay_as_they_were_written() {
        let written = variables("worker: {env: {A: 1.10, B: 'x', C: true, D: 0x10, E: '~'}}");
        assert_eq!(written, ["A=1.10", "B=x", "C=true", "D=0x10", "E=~"]);
        let merged = "x-a: &a {A: 1.10, B: 2}\nworker:\n  env:\n    <<: *a\n    B: 3.0\n";
        assert_eq!(variables(merged), ["A=1.10", "B=3.0"]);
        let (_, argv) = read("command: {argv: [0x10, true, 1.10]}").expect("right");
        assert_eq!(argv, ["0x10", "true", "1.10"]);
    }

    #[test]
    fn a_name_without_a_value_is_inherited() {
        assert_eq!(variables("worker:\n  env:\n    N:\n    A: 1\n"), ["A=1", "N=4"]);
        assert_eq!(variables("x-a: &a {N: ~}\nworker: {env: *a}\n"), ["N=4"]);
        for latin in ["worker: {env: {LATIN: }}", "name: ${LATIN}", "name: '${LATIN:-a}'"] {
            let error = read(latin).expect_err(latin);
            assert!(error.contains("the variable LATIN is not UTF-8"), "{error}");
        }
        let error = read("worker: {env: {M: }}").expect_err("not set");
        assert!(error.contains("test:2:16: worker.env.M: the variable M is not set"), "{error}");
    }

    #[test]
    fn what_names_nothing_is_refused_at_its_place() {
        for (text, words) in [
            ("a: 1\nb: ${M}", "test:2:4: b: the variable M is not set"),
            ("a: ${}", "names no variable"),
            ("a: ${1}", "names no variable"),
            ("a: ${N:?x}", "names no variable"),
            ("a: 'x${N'", "is not closed"),
            ("a: |\n  ${N}\n", "texts of several lines"),
        ] {
            let error = put(text).expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn a_value_is_one_text_whatever_is_in_it(value in "\\PC*|[\\x00-\\x7f]*", before in "[a-z]{0,3}") {
            let text = format!("a: {{b: \"{before}${{V}}\", c: 1}}\n");
            let read = put_with(&text, &|_| Some(value.clone().into())).expect("set");
            prop_assert_eq!(read, json!({"a": {"b": format!("{before}{value}"), "c": 1}}));
        }
    }
}
