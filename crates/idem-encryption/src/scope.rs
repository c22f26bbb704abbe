//! Digests in place of principals and operations.

use std::fmt::{self, Write as _};

use hmac::{Hmac, KeyInit as _, Mac as _};
use idem_core::{RecordFilter, Scope};
use sha2::Sha256;
use zeroize::Zeroize as _;

/// How a stored principal or operation begins.
const MARK: &str = "hmac:";

/// The secret under which principals and operations are hashed.
#[derive(Clone)]
pub(crate) struct ScopeSecret(Hmac<Sha256>);

impl ScopeSecret {
    pub(crate) fn new(mut secret: [u8; 32]) -> Self {
        // HMAC fills a shorter key with zeros (RFC 2104 section 2).
        let mut block = [0; 64];
        block[..32].copy_from_slice(&secret);
        let hmac = Hmac::new((&block).into());
        secret.zeroize();
        block.zeroize();
        Self(hmac)
    }

    pub(crate) fn scope(&self, scope: &Scope) -> Scope {
        let operation = self.operation(scope.operation());
        match scope.principal() {
            Some(principal) => Scope::new(self.principal(principal), operation),
            None => Scope::single_tenant(operation),
        }
    }

    /// The filter for what the store keeps. A text that has the stored form stays.
    pub(crate) fn filter(&self, filter: &RecordFilter) -> RecordFilter {
        RecordFilter {
            principal: filter.principal.as_deref().map(|text| stored(text, |text| self.principal(text))),
            operation: filter.operation.as_deref().map(|text| stored(text, |text| self.operation(text))),
            ..filter.clone()
        }
    }

    pub(crate) fn principal(&self, principal: &str) -> String {
        self.digest(1, principal)
    }

    fn operation(&self, operation: &str) -> String {
        self.digest(2, operation)
    }

    fn digest(&self, kind: u8, text: &str) -> String {
        let digest = self.0.clone().chain_update([kind]).chain_update(text).finalize().into_bytes();
        let mut marked = String::with_capacity(MARK.len() + 2 * digest.len());
        marked.push_str(MARK);
        for byte in digest {
            // A string takes whatever is written.
            let _ = write!(marked, "{byte:02x}");
        }
        marked
    }
}

/// The text if it has the stored form, else its digest.
fn stored(text: &str, digest: impl FnOnce(&str) -> String) -> String {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_stored = text.strip_prefix(MARK).is_some_and(|digits| digits.len() == 64 && digits.bytes().all(is_digit));
    if is_stored { text.to_owned() } else { digest(text) }
}

impl fmt::Debug for ScopeSecret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ScopeSecret(redacted)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By `printf '\1acme' | openssl dgst -sha256 -mac HMAC -macopt hexkey:0909…`, and so on.
    #[test]
    fn the_digests_are_these() {
        let secret = ScopeSecret::new([9; 32]);
        let scope = secret.scope(&Scope::new("acme", "acme"));
        assert_eq!(scope.principal(), Some("hmac:6678f6ed0c16227307ad4b8856b5dc13a2cb82111ab3b0108f20c6c909856c01"));
        assert_eq!(scope.operation(), "hmac:fcdd7934db194574ed06cd4ba46b57661f9edbfed56f17618fd52a4c816f4464");
        assert_eq!(secret.scope(&Scope::single_tenant("acme")), Scope::single_tenant(scope.operation()));
        // Applications may call a principal so.
        for plain in ["hmac:", "hmac:00", &format!("hmac:{}", "g".repeat(64)), &"0".repeat(64)] {
            let filter = RecordFilter { principal: Some(plain.to_owned()), ..RecordFilter::default() };
            assert_eq!(secret.filter(&filter).principal, Some(secret.principal(plain)));
        }
        assert_eq!(format!("{secret:?}"), "ScopeSecret(redacted)");
    }
}
