//! Masks secrets in environments, arguments and logs that are shown or shared.
//!
//! A secret is recognised by the name before it, so one without a name is not masked.
//!
//! *Invariant:* no value remains whose name suggests a secret.

use std::collections::BTreeMap;

use serde_json::Value;

/// Parts of names that suggest a secret.
const SECRETS: [&str; 7] = ["SECRET", "TOKEN", "PASSW", "CREDENTIAL", "AUTH", "PRIVATE", "KEY"];

/// What is shown instead.
const MASK: &str = "***";

fn suggests_a_secret(name: &str) -> bool {
    let upper = name.to_uppercase();
    SECRETS.iter().any(|word| upper.contains(word))
}

/// An environment with secret values and passwords in URLs masked.
pub fn masked(environment: impl IntoIterator<Item = (String, String)>) -> BTreeMap<String, String> {
    environment
        .into_iter()
        .map(|(name, value)| {
            let secret = suggests_a_secret(&name);
            let value = if secret { MASK.to_owned() } else { without_password(&value) };
            (name, value)
        })
        .collect()
}

/// A line with the words masked that follow a secret's name, as in `--token abc`, `PASSWORD=abc`,
/// `"api_key": "abc"` or `Bearer abc`, and with passwords in URLs masked.
pub fn masked_line(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut named = false;
    for word in line.split_inclusive(char::is_whitespace) {
        let text = word.trim_end();
        if text.is_empty() {
            out.push_str(word);
            continue;
        }
        let assigned = text.split_once('=').filter(|(name, _)| suggests_a_secret(name));
        match assigned {
            Some((_, "")) => out.push_str(text),
            Some((name, _)) => out.push_str(&format!("{name}={MASK}")),
            // A scheme's name, as in `Authorization: Bearer abc`, comes before the secret itself.
            None if named && !is_scheme(text) => out.push_str(MASK),
            None => out.push_str(&without_password(text)),
        }
        out.push_str(&word[text.len()..]);
        named = is_scheme(text) || announces(text);
    }
    out
}

/// A list of arguments with secrets masked, as [`masked_line`] does.
pub(crate) fn masked_arguments(arguments: &[String]) -> Vec<String> {
    let mut named = false;
    let mut masked = |argument: &String| {
        let is_value = std::mem::replace(&mut named, announces(argument));
        if is_value && !argument.starts_with('-') {
            return MASK.to_owned();
        }
        match argument.split_once('=') {
            Some((name, value)) if suggests_a_secret(name) && !value.is_empty() => {
                format!("{name}={MASK}")
            }
            // A script may be one argument.
            _ => masked_line(argument),
        }
    };
    arguments.iter().map(&mut masked).collect()
}

/// A JSON value with the secrets in its objects, lists of arguments and texts masked.
pub fn masked_json(value: Value) -> Value {
    match value {
        Value::Object(object) => {
            // A reason of a plan: what was decided, and what was chosen.
            let choice = object.get("choice").and_then(Value::as_str);
            let chosen = choice.is_some_and(suggests_a_secret);
            let is_secret = |name: &str| suggests_a_secret(name) || chosen && name == "chosen";
            object
                .into_iter()
                .map(|(name, value)| match value {
                    Value::String(text) if is_secret(&name) && !text.is_empty() => {
                        (name, MASK.into())
                    }
                    value => (name, masked_json(value)),
                })
                .collect()
        }
        Value::Array(list) => {
            let words: Option<Vec<String>> =
                list.iter().map(|item| item.as_str().map(str::to_owned)).collect();
            match words {
                Some(words) => masked_arguments(&words).into(),
                None => list.into_iter().map(masked_json).collect(),
            }
        }
        Value::String(text) => masked_line(&text).into(),
        other => other,
    }
}

fn is_scheme(word: &str) -> bool {
    ["bearer", "basic"].iter().any(|scheme| word.eq_ignore_ascii_case(scheme))
}

/// Whether a secret follows: `--token`, `password:`, `"api_key":`, `SECRET=`.
fn announces(word: &str) -> bool {
    let flag = word.starts_with("--") && !word.contains('=');
    (flag || word.ends_with([':', '='])) && suggests_a_secret(word)
}

/// `scheme://user:password@host` without the password.
fn without_password(value: &str) -> String {
    let masked = || {
        let (scheme, rest) = value.split_once("://")?;
        let authority = rest.split('/').next()?;
        let (login, _) = authority.rsplit_once('@')?;
        let (user, _) = login.split_once(':')?;
        Some(format!("{scheme}://{user}:{MASK}{}", &rest[login.len()..]))
    };
    masked().unwrap_or_else(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn secrets_are_masked_and_the_rest_is_not() {
        let environment = [
            ("AWS_SECRET_ACCESS_KEY", "abc"),
            ("hf_token", "abc"),
            ("UCX_TLS", "rc,sm"),
            ("HTTPS_PROXY", "http://me:pass:word@proxy:80/x"),
            ("URL", "http://host/a:b@c"),
        ];
        let masked = masked(environment.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(masked["AWS_SECRET_ACCESS_KEY"], "***");
        assert_eq!(masked["hf_token"], "***");
        assert_eq!(masked["UCX_TLS"], "rc,sm");
        assert_eq!(masked["HTTPS_PROXY"], "http://me:***@proxy:80/x");
        assert_eq!(masked["URL"], "http://host/a:b@c");
    }

    #[test]
    fn lines_keep_everything_but_the_secrets() {
        for (line, expected) in [
            ("gpu0: READY  after 3 ms", "gpu0: READY  after 3 ms"),
            ("run --token abc --rank 3", "run --token *** --rank 3"),
            ("HF_TOKEN=abc  UCX_TLS=rc", "HF_TOKEN=***  UCX_TLS=rc"),
            ("{\"password\": \"abc\"}", "{\"password\": ***"),
            ("Authorization: Bearer abc", "Authorization: Bearer ***"),
            ("at http://me:abc@proxy/x now", "at http://me:***@proxy/x now"),
        ] {
            assert_eq!(masked_line(line), expected);
        }
    }

    #[test]
    fn arguments_keep_everything_but_the_secrets() {
        let arguments =
            ["sh", "--api-key", "abc", "--auth-token=abc", "-c", "TLS=rc A_TOKEN=abc run"];
        let masked = masked_arguments(&arguments.map(str::to_owned));
        let expected =
            ["sh", "--api-key", "***", "--auth-token=***", "-c", "TLS=rc A_TOKEN=*** run"];
        assert_eq!(masked, expected);
    }

    #[test]
    fn a_value_keeps_everything_but_the_secrets() {
        let value = serde_json::json!({
            "env": { "API_TOKEN": "abc", "UCX_TLS": "rc" },
            "argv": ["run", "--password", "abc"],
            "workers": [{ "threads": 1, "url": "tcp://me:abc@host" }],
            "why": [{ "choice": "env.API_TOKEN", "chosen": "abc" }, { "choice": "nic", "chosen": "x" }],
        });
        let masked = masked_json(value);
        assert_eq!(
            masked,
            serde_json::json!({
                "env": { "API_TOKEN": "***", "UCX_TLS": "rc" },
                "argv": ["run", "--password", "***"],
                "workers": [{ "threads": 1, "url": "tcp://me:***@host" }],
                "why": [{ "choice": "env.API_TOKEN", "chosen": "***" }, { "choice": "nic", "chosen": "x" }],
            })
        );
    }

    proptest! {
        #[test]
        fn a_named_secret_is_in_no_line(before in "[a-z :=-]{0,20}", secret in "Q[0-9]{8}Q") {
            for named in [format!("--token {secret}"), format!("API_KEY={secret}"),
                          format!("password: {secret}"), format!("Bearer {secret}")] {
                let line = masked_line(&format!("{before} {named} after"));
                prop_assert!(!line.contains(&secret), "{}", line);
            }
        }
    }
}
