//! The scope inside which an idempotency key is unique.

use std::fmt;
use std::sync::Arc;

/// A principal and an operation: inside one scope, an idempotency key is unique.
///
/// Two tenants may send the same key, and one tenant may send the same key to two routes: these requests never meet
/// (law L6). There is no default: name the principal, or call [`Scope::single_tenant`] if there is only one.
///
/// Both parts may hold any text; [`RecordId`](crate::RecordId) frames them, so that no choice of bytes makes two
/// scopes collide. They are kept readable in the record for operators, so do not put secrets into them: name the
/// account, not its token.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Scope {
    principal: Option<Arc<str>>,
    operation: Arc<str>,
}

impl Scope {
    /// The scope of `principal` (tenant, account, user) for `operation` (for HTTP: method and route, as in
    /// `POST /v1/payments`).
    #[must_use]
    pub fn new(principal: impl Into<Arc<str>>, operation: impl Into<Arc<str>>) -> Self {
        Self { principal: Some(principal.into()), operation: operation.into() }
    }

    /// The scope of an application that has one tenant only, said explicitly.
    ///
    /// It differs from every [`Scope::new`], also from one with an empty principal.
    #[must_use]
    pub fn single_tenant(operation: impl Into<Arc<str>>) -> Self {
        Self { principal: None, operation: operation.into() }
    }

    /// The principal, or `None` for a single-tenant scope.
    #[must_use]
    pub fn principal(&self) -> Option<&str> {
        self.principal.as_deref()
    }

    /// The operation.
    #[must_use]
    pub fn operation(&self) -> &str {
        &self.operation
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let principal = if self.principal.is_some() { "redacted" } else { "single tenant" };
        write!(formatter, "Scope({principal}, {})", self.operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_tenant_scope_differs_from_an_empty_principal() {
        assert_ne!(Scope::single_tenant("pay"), Scope::new("", "pay"));
        assert_eq!(Scope::single_tenant("pay").principal(), None);
        assert_eq!(Scope::new("acme", "pay").principal(), Some("acme"));
        assert_eq!(Scope::new("acme", "pay").operation(), "pay");
    }

    #[test]
    fn debug_output_hides_the_principal() {
        assert_eq!(format!("{:?}", Scope::new("acme", "pay")), "Scope(redacted, pay)");
        assert_eq!(format!("{:?}", Scope::single_tenant("pay")), "Scope(single tenant, pay)");
    }
}
