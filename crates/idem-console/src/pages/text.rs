//! How values are shown.

use idem_core::OwnerToken;

/// A token in hexadecimal digits.
pub(crate) fn token(token: &OwnerToken) -> String {
    format!("{:032x}", u128::from_be_bytes(*token.as_bytes()))
}

/// Text in which each letter can be seen. A client chooses principals, operations and answers, and must not hide or turn around what
/// follows them. Line breaks stay.
pub(crate) fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        let is_escaped = letter.is_control() || !letter.is_ascii() && letter.escape_debug().count() > 1;
        match letter {
            '\n' => shown.push(letter),
            _ if is_escaped => shown.extend(letter.escape_debug()),
            _ => shown.push(letter),
        }
    }
    shown
}

/// A whole number with a space between groups of three digits.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut shown = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            shown.push('\u{202f}');
        }
        shown.push(digit);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_hides_or_turns_around_what_follows() {
        assert_eq!(visible("a\u{202e}b\u{200b}c\u{7}é\n<"), "a\\u{202e}b\\u{200b}c\\u{7}é\n<");
    }

    #[test]
    fn numbers_have_groups() {
        assert_eq!(
            ["0", "999", "1 000", "12 345 678"],
            [0, 999, 1_000, 12_345_678]
                .map(|number| grouped(number).replace('\u{202f}', " "))
                .map(|text| text)
                .each_ref()
                .map(String::as_str)
        );
    }
}
