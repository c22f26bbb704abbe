//! Protection against requests that another site makes in the name of the operator.
//!
//! A form of the console carries a token: an HMAC of the actor and the record under a secret that no other site knows. The browser's
//! own word on where a request comes from (`Sec-Fetch-Site`) is believed as well. The crate `axum_csrf` was tried: it keeps its token in
//! a cookie, so that the console would need a key for cookies besides the application's login.

use hmac::{Hmac, KeyInit as _, Mac as _};
use http::HeaderMap;
use idem_core::RecordId;
use sha2::Sha256;

/// Makes and checks the tokens of forms.
#[derive(Clone)]
pub(crate) struct Tokens(Hmac<Sha256>);

impl Tokens {
    /// `None` never happens: HMAC takes keys of each length.
    pub(crate) fn new(secret: &[u8]) -> Option<Self> {
        Hmac::new_from_slice(secret).ok().map(Self)
    }

    /// The token of the form with which this actor resolves this record.
    pub(crate) fn of(&self, actor: &str, record: &RecordId) -> String {
        let token = self.mac(actor, record).finalize().into_bytes();
        token.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether a form has its token. Takes the same time wherever a wrong one differs.
    pub(crate) fn is_of(&self, token: &str, actor: &str, record: &RecordId) -> bool {
        let Ok(token) = token.parse::<RecordId>() else { return false };
        self.mac(actor, record).verify_slice(token.as_bytes()).is_ok()
    }

    fn mac(&self, actor: &str, record: &RecordId) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(record.as_bytes());
        mac.update(actor.as_bytes());
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
        let tokens = Tokens::new(b"secret").unwrap();
        let [one, other] = [1, 2].map(|byte| RecordId::from_bytes([byte; 32]));
        let token = tokens.of("ann", &one);
        assert!(tokens.is_of(&token, "ann", &one));
        assert!(!tokens.is_of(&token, "bob", &one) && !tokens.is_of(&token, "ann", &other));
        assert!(!Tokens::new(b"another").unwrap().is_of(&token, "ann", &one));
        assert!(["", "00", &token[1..], &format!("{token}0")].iter().all(|wrong| !tokens.is_of(wrong, "ann", &one)));
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
