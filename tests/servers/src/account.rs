//! The account that runs the servers.

use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::Error;

/// An account without privileges: Postgres and PgBouncer refuse to run as root.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Account {
    user: u32,
    group: u32,
}

impl Account {
    /// The account for a server with this folder; `None` if the current account will do.
    pub(crate) fn for_owner_of(folder: &Path) -> Result<Option<Account>, Error> {
        let metadata = folder.metadata().map_err(Error::io(format!("read {}", folder.display())))?;
        // This process has just made the folder, so the folder's owner is its account.
        if metadata.uid() != 0 {
            return Ok(None);
        }
        let accounts = std::fs::read_to_string("/etc/passwd").map_err(Error::io("read /etc/passwd"))?;
        let account = Account::named("postgres", &accounts).or_else(|| Account::named("nobody", &accounts));
        account.map(Some).ok_or_else(|| Error::Missing {
            what: "servers do not run as root, and /etc/passwd has neither `postgres` nor `nobody`".into(),
            advice: "run the tests as another user".into(),
        })
    }

    fn named(name: &str, accounts: &str) -> Option<Account> {
        accounts.lines().find_map(|line| match line.split(':').collect::<Vec<_>>()[..] {
            [found, _, user, group, ..] if found == name => {
                Some(Account { user: user.parse().ok()?, group: group.parse().ok()? })
            }
            _ => None,
        })
    }

    pub(crate) fn own(self, path: &Path) -> Result<(), Error> {
        chown(path, Some(self.user), Some(self.group)).map_err(Error::io(format!("chown {}", path.display())))
    }

    pub(crate) fn run(self, command: &mut Command) {
        command.uid(self.user).gid(self.group);
    }
}

#[cfg(test)]
mod tests {
    use super::Account;

    #[test]
    fn an_account_is_found_by_its_whole_name() {
        let accounts =
            "root:x:0:0:root:/root:/bin/bash\npostgres-old:x:7:8::/:/bin/sh\npostgres:x:101:104:,,,:/:/bin/sh\n";
        assert_eq!(Account::named("postgres", accounts), Some(Account { user: 101, group: 104 }));
        assert_eq!(Account::named("nobody", accounts), None);
    }
}
