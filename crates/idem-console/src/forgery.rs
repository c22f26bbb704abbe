//! Protection against requests that another site makes in the name of the operator.
//!
//! A form of the console carries a token: an HMAC of the actor and the record under a secret that no other site knows. The browser's
//! own word on where a request comes from (`Sec-Fetch-Site`) is believed as well. The crate `axum_csrf` keeps its token in a cookie, so
//! that the console would need a key for cookies besides the application's login.

use hmac::{Hmac, KeyInit as _, Mac as _};
use http::HeaderMap;
use idem_core::{OwnerToken, RecordId};
use sha2::Sha256;

/// The secret of a console, and what it makes of it.
#[derive(Clone)]
pub(crate) struct Secret(Hmac<Sha256>);

impl Secret {
    /// `None` never happens: HMAC takes keys of each length.
    pub(crate) fn new(secret: &[u8]) -> Option<Self> {
        Hmac::new_from_slice(secret).ok().map(Self)
    }

    /// The action of a form. A form that is sent twice is one action, and a form with another content is another one.
    pub(crate) fn action(&self, actor: &str, record: &RecordId, content: &[&str]) -> OwnerToken {
        let mut mac = self.mac("action", actor, record);
        for text in content {
            mac.update(&(text.len() as u64).to_be_bytes());
            mac.update(text.as_bytes());
        }
        let mut action = [0; 16];
        action.copy_from_slice(&mac.finalize().into_bytes()[..16]);
        OwnerToken::from_bytes(action)
    }

    /// A key for another use.
    pub(crate) fn key(&self, purpose: &str) -> [u8; 32] {
        let mut mac = self.0.clone();
        mac.update(purpose.as_bytes());
        mac.finalize().into_bytes().into()
    }

    /// The token of the form with which this actor resolves this record.
    pub(crate) fn form(&self, actor: &str, record: &RecordId) -> String {
        let token = self.mac("form", actor, record).finalize().into_bytes();
        token.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether a form has its token. Takes the same time wherever a wrong one differs.
    pub(crate) fn is_form(&self, token: &str, actor: &str, record: &RecordId) -> bool {
        let Ok(token) = token.parse::<RecordId>() else { return false };
        self.mac("form", actor, record).verify_slice(token.as_bytes()).is_ok()
    }

    fn mac(&self, purpose: &str, actor: &str, record: &RecordId) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        for part in [purpose.as_bytes(), record.as_bytes(), actor.as_bytes()] {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part);
        }
        mac
    }
}

/// Whether the browser says that another site made the request.
pub(crate) fn is_from_another_site(headers: &HeaderMap) -> bool {
    headers.get("sec-fetch-site").is_some_and(|site| site != "same-origin" && site != "none")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_for_one_actor_and_one_record() {
        let tokens = Secret::new(b"secret").unwrap();
        let [one, other] = [1, 2].map(|byte| RecordId::from_bytes([byte; 32]));
        let token = tokens.form("ann", &one);
        assert!(tokens.is_form(&token, "ann", &one));
        assert!(!tokens.is_form(&token, "bob", &one) && !tokens.is_form(&token, "ann", &other));
        assert!(!Secret::new(b"another").unwrap().is_form(&token, "ann", &one));
        assert!(["", "00", &token[1..], &format!("{token}0")].iter().all(|wrong| !tokens.is_form(wrong, "ann", &one)));
    }

    #[test]
    fn an_action_is_that_of_its_content() {
        let secret = Secret::new(b"secret").unwrap();
        let id = RecordId::from_bytes([1; 32]);
        let action = secret.action("ann", &id, &["a", "b"]);
        assert_eq!(secret.action("ann", &id, &["a", "b"]), action);
        let others = [
            secret.action("bob", &id, &["a", "b"]),
            secret.action("ann", &RecordId::from_bytes([2; 32]), &["a", "b"]),
            secret.action("ann", &id, &["ab", ""]),
            secret.action("ann", &id, &["a"]),
        ];
        assert!(!others.contains(&action));
    }

    #[test]
    fn the_browser_is_believed() {
        let from = |site: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("sec-fetch-site", http::HeaderValue::from_static(site));
            is_from_another_site(&headers)
        };
        assert!(!is_from_another_site(&HeaderMap::new()) && !from("same-origin") && !from("none"));
        assert!(from("cross-site") && from("same-site") && from(""));
    }
}
