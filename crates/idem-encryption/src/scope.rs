//! Digests in place of principals and operations.

use std::fmt::{self, Write as _};

use hmac::{Hmac, KeyInit as _, Mac as _};
use idem_core::{RecordFilter, Scope};
use sha2::Sha256;
use zeroize::Zeroize as _;

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

    /// The filter for what the store keeps.
    pub(crate) fn filter(&self, filter: &RecordFilter) -> RecordFilter {
        RecordFilter {
            principal: filter.principal.as_deref().map(|principal| self.principal(principal)),
            operation: filter.operation.as_deref().map(|operation| self.operation(operation)),
            ..filter.clone()
        }
    }

    fn principal(&self, principal: &str) -> String {
        self.digest(1, principal)
    }

    fn operation(&self, operation: &str) -> String {
        self.digest(2, operation)
    }

    fn digest(&self, kind: u8, text: &str) -> String {
        let digest = self.0.clone().chain_update([kind]).chain_update(text).finalize().into_bytes();
        let mut hexadecimal = String::with_capacity(2 * digest.len());
        for byte in digest {
            // A string takes whatever is written.
            let _ = write!(hexadecimal, "{byte:02x}");
        }
        hexadecimal
    }
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
        assert_eq!(scope.principal(), Some("6678f6ed0c16227307ad4b8856b5dc13a2cb82111ab3b0108f20c6c909856c01"));
        assert_eq!(scope.operation(), "fcdd7934db194574ed06cd4ba46b57661f9edbfed56f17618fd52a4c816f4464");
        assert_eq!(secret.scope(&Scope::single_tenant("acme")), Scope::single_tenant(scope.operation()));
        assert_eq!(format!("{secret:?}"), "ScopeSecret(redacted)");
    }
}
