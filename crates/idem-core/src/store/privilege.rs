//! What a store's login may not do.

use std::fmt;

/// A privilege that a login lacks on a table or function of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingPrivilege {
    /// Its name in SQL, as in `DELETE`.
    pub privilege: String,
    /// What it is missing on, as in `idem_records`.
    pub object: String,
}

impl MissingPrivilege {
    /// A privilege by its name, and what it is missing on.
    #[must_use]
    pub fn new(privilege: impl Into<String>, object: impl Into<String>) -> Self {
        Self { privilege: privilege.into(), object: object.into() }
    }
}

/// As in `DELETE on idem_records`.
impl fmt::Display for MissingPrivilege {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} on {}", self.privilege, self.object)
    }
}
