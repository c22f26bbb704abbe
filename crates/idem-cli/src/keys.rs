//! The file with the keys of an encrypted store.

use std::error::Error;
use std::path::Path;

use idem_encryption::{EncryptionConfig, Keys};

/// Reads the keys, and what else the application has set, from a file that only its owner can read.
///
/// Each line is a word and its values. `#` begins a comment at the beginning of a line and after a blank:
/// ```text
/// primary 2 64-hexadecimal-digits
/// old 1 64-hexadecimal-digits
/// scopes 64-hexadecimal-digits
/// context production
/// reads-unencrypted
/// ```
pub(crate) fn read(path: &Path) -> Result<EncryptionConfig, Box<dyn Error>> {
    let shown = path.display();
    expect_private(path)?;
    let text = std::fs::read_to_string(path).map_err(|error| format!("{shown} cannot be read: {error}"))?;
    parse(&text).map_err(|error| format!("{shown}: {error}").into())
}

#[cfg(unix)]
fn expect_private(path: &Path) -> Result<(), Box<dyn Error>> {
    use std::os::unix::fs::PermissionsExt as _;
    let shown = path.display();
    let found = std::fs::metadata(path).map_err(|error| format!("{shown} cannot be read: {error}"))?;
    match found.permissions().mode() & 0o077 {
        0 => Ok(()),
        _ => {
            Err(format!("other users may read or write {shown}: run `chmod 600 {shown}`, and consider new keys").into())
        }
    }
}

#[cfg(not(unix))]
fn expect_private(_: &Path) -> Result<(), Box<dyn Error>> {
    Ok(())
}

fn parse(text: &str) -> Result<EncryptionConfig, String> {
    let (mut primary, mut old, mut scopes, mut context, mut reads_unencrypted) = (None, Vec::new(), None, None, false);
    for (at, line) in text.lines().enumerate() {
        // No part of a line is shown: it may be a key.
        let wrong = |what: &str| format!("line {}: {what}", at + 1);
        let words: Vec<&str> = line.split_whitespace().take_while(|word| !word.starts_with('#')).collect();
        if words.iter().any(|word| word.contains('#')) {
            return Err(wrong("`#` begins a comment only after a blank, and no value may contain it"));
        }
        let id = |text: &str| text.parse::<u32>().map_err(|_| wrong("the id of a key is a number up to 4294967295"));
        let key = |text: &str| bytes(text).ok_or_else(|| wrong("a key has 64 hexadecimal digits"));
        match words[..] {
            [] => {}
            ["primary", number, digits] if primary.is_none() => primary = Some((id(number)?, key(digits)?)),
            ["old", number, digits] => old.push((id(number)?, key(digits)?)),
            ["scopes", digits] if scopes.is_none() => scopes = Some(key(digits)?),
            ["context", text] if context.is_none() => context = Some(text),
            ["reads-unencrypted"] => reads_unencrypted = true,
            ["primary", ..] => return Err(wrong("there is one primary key, with an id and a key")),
            ["scopes", _] => return Err(wrong("a second key of scopes; leave only the one of the application")),
            ["context", _] => return Err(wrong("a second context; leave only the one of the application")),
            _ => {
                return Err(wrong(
                    "a line is `primary ID KEY`, `old ID KEY`, `scopes KEY`, `context TEXT` or `reads-unencrypted`",
                ));
            }
        }
    }
    let (id, key) = primary.ok_or("there is no line `primary ID KEY`")?;
    let mut keys = Keys::new(id, key);
    for (id, key) in old {
        keys = keys.with_old(id, key).map_err(|error| error.to_string())?;
    }
    let config = EncryptionConfig::new(keys);
    let config = if reads_unencrypted { config.reading_unencrypted_records() } else { config };
    let config = match context {
        Some(context) => config.with_context(context),
        None => config,
    };
    Ok(match scopes {
        Some(secret) => config.hashing_scopes(secret),
        None => config,
    })
}

/// 32 bytes from 64 hexadecimal digits.
fn bytes(digits: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if digits.len() != 64 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_in_a_file_is_said_without_showing_it() {
        let digits = "ab".repeat(32);
        let primary = format!("primary 2 {digits}");
        parse(&format!(
            "# of production\n{primary}\nold 1 {digits} # until May\nscopes {digits}\ncontext p\nreads-unencrypted"
        ))
        .unwrap();
        for (text, expected) in [
            (String::new(), "no line `primary"),
            (format!("{primary}\n{primary}"), "line 2: there is one primary"),
            (format!("{primary}\nold 2 {digits}"), "two keys have the id 2"),
            (format!("primary two {digits}"), "line 1: the id"),
            (format!("primary 2 {digits}0"), "line 1: a key has 64"),
            (format!("{primary}\n{digits}"), "line 2: a line is"),
            (format!("{primary}\n\ncontext prod#1"), "line 3: `#` begins a comment only after a blank"),
            (format!("{primary}# of May"), "line 1: `#` begins"),
            (format!("{primary}\ncontext one\ncontext two"), "line 3: a second context"),
            (format!("{primary}\nscopes {digits}\nscopes {digits}"), "line 3: a second key of scopes"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(expected) && !error.contains("abab"), "{error}");
        }
    }
}
