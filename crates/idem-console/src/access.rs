//! What the client of a request may see and do.

use async_trait::async_trait;
use http::request::Parts;
use idem_core::{Origin, StateName};

/// Says what the client of a request may see and do.
///
/// The console has no login. Mount it behind that of your application, and say here what the login found out: it usually leaves a user
/// in the extensions of the request.
#[async_trait]
pub trait Access: Send + Sync + 'static {
    /// The permissions of the client of this request. Called once for each request, before anything is read.
    async fn permissions(&self, request: &Parts) -> Permissions;
}

/// What a client may see and do. By default nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use]
pub struct Permissions {
    pub(crate) actor: String,
    pub(crate) reads: bool,
    pub(crate) reads_answers: bool,
    pub(crate) resolves: Vec<StateName>,
    pub(crate) tenant: Option<Tenant>,
}

/// The records of one tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tenant {
    pub(crate) namespace: String,
    pub(crate) principal: String,
}

impl Permissions {
    /// No permissions: each page answers 403.
    pub fn none() -> Self {
        Self::default()
    }

    /// Reading records without their answers, as this actor. The notes of repairs name the actor.
    pub fn read_only(actor: impl Into<String>) -> Self {
        Self { actor: actor.into(), reads: true, ..Self::default() }
    }

    /// Also reading the stored answers, which may hold secrets of clients.
    pub fn and_answers(self) -> Self {
        Self { reads_answers: true, ..self }
    }

    /// Also resolving operations, each as every state.
    pub fn and_resolve(self) -> Self {
        self.and_resolve_as(&[StateName::Completed, StateName::Failed, StateName::Retryable, StateName::OutcomeUnknown])
    }

    /// Also resolving operations as one of these states.
    ///
    /// An example: `OutcomeUnknown` alone for those who may stop a crashed run, but not decide how it ended.
    pub fn and_resolve_as(self, states: &[StateName]) -> Self {
        Self { resolves: states.to_vec(), ..self }
    }

    /// Only the records of this principal in this namespace. The others do not exist for the client, and neither do counts and the list
    /// of repairs.
    ///
    /// A store that does not keep where records came from, such as Redis, cannot select them: its lists answer 400, and no record is
    /// shown.
    pub fn only(self, namespace: impl Into<String>, principal: impl Into<String>) -> Self {
        Self { tenant: Some(Tenant { namespace: namespace.into(), principal: principal.into() }), ..self }
    }

    /// Whether the client may know of a record that came from there.
    pub(crate) fn sees(&self, origin: Option<&Origin>) -> bool {
        self.tenant.as_ref().is_none_or(|tenant| {
            origin.is_some_and(|origin| {
                *origin.namespace == *tenant.namespace && origin.scope.principal() == Some(tenant.principal.as_str())
            })
        })
    }

    pub(crate) fn may_resolve_as(&self, state: StateName) -> bool {
        self.reads && self.resolves.contains(&state)
    }
}

#[cfg(test)]
mod tests {
    use idem_core::Scope;

    use super::*;

    #[test]
    fn a_tenant_sees_its_own_records_only() {
        let origin = |namespace: &str, scope| Origin { namespace: namespace.into(), scope };
        let own = Permissions::read_only("a").only("app", "acme");
        assert!(own.sees(Some(&origin("app", Scope::new("acme", "POST /")))));
        for other in [
            origin("app", Scope::new("other", "POST /")),
            origin("other", Scope::new("acme", "POST /")),
            origin("app", Scope::single_tenant("POST /")),
        ] {
            assert!(!own.sees(Some(&other)), "{other:?}");
        }
        assert!(!own.sees(None));
        assert!(Permissions::read_only("a").sees(None));
    }

    #[test]
    fn nothing_is_permitted_unless_it_is_said() {
        let states = StateName::ALL;
        assert!(!Permissions::none().reads && !Permissions::read_only("a").reads_answers);
        assert!(states.iter().all(|state| !Permissions::read_only("a").may_resolve_as(*state)));
        let stopping = Permissions::read_only("a").and_resolve_as(&[StateName::OutcomeUnknown]);
        let permitted = states.iter().filter(|state| stopping.may_resolve_as(**state));
        assert_eq!(permitted.collect::<Vec<_>>(), [&StateName::OutcomeUnknown]);
    }
}
