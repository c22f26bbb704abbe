//! The principals to whom keys belong. A layer without a scope does not compile.

use std::fmt;

use idem_core::Scope;

/// Names the scope of a request from its head, which is of a framework's type `H`. Give a layer one by `scope` or
/// `single_tenant`.
#[diagnostic::on_unimplemented(
    message = "this idempotency layer does not know to whom keys belong",
    label = "the layer has no scope",
    note = "two tenants may send the same key, and must never get each other's answer",
    note = "add `.scope(|request| principal_of(request))`, or `.single_tenant()` if there is only one"
)]
pub trait ScopeSource<H>: Clone + Send + Sync + 'static {
    /// The scope of a request to `operation` (method and route), or `None` when the request has no principal.
    fn scope_of(&self, request: &H, operation: String) -> Option<Scope>;
}

/// The scope of a new layer, which cannot be used before it has another one.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ScopeMissing;

/// The scope of a layer with one tenant.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SingleTenant;

impl<H> ScopeSource<H> for SingleTenant {
    fn scope_of(&self, _: &H, operation: String) -> Option<Scope> {
        Some(Scope::single_tenant(operation))
    }
}

/// The scope of a layer whose function names the principal.
#[derive(Clone)]
pub struct ByPrincipal<F>(pub(crate) F);

impl<H, F, P> ScopeSource<H> for ByPrincipal<F>
where
    F: Fn(&H) -> Option<P> + Clone + Send + Sync + 'static,
    P: Into<String>,
{
    fn scope_of(&self, request: &H, operation: String) -> Option<Scope> {
        let principal = (self.0)(request).map(Into::into);
        // A proxy may empty a header field instead of removing it. All of its anonymous clients would share their keys.
        principal.filter(|principal: &String| !principal.is_empty()).map(|principal| Scope::new(principal, operation))
    }
}

impl<F> fmt::Debug for ByPrincipal<F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ByPrincipal")
    }
}
