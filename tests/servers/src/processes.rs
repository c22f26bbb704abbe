//! Lists the processes of this machine, for killing servers.

use std::path::Path;
use std::process::Command;

use crate::Error;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Process {
    pub(crate) id: u32,
    pub(crate) parent: u32,
    /// `Z` for a zombie, `T` for a stopped process; other letters do not matter here.
    pub(crate) state: char,
}

/// All processes: from /proc, because a small machine may lack `ps`, or from `ps` if there is no /proc.
pub(crate) fn all() -> Result<Vec<Process>, Error> {
    if !Path::new("/proc/self/stat").exists() {
        let output = Command::new("ps").args(["-A", "-o", "pid=,ppid=,stat="]).output().map_err(Error::io("run ps"))?;
        return Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(from_ps).collect());
    }
    let entries = Path::new("/proc").read_dir().map_err(Error::io("read /proc"))?;
    // A process may end between being listed and being read.
    Ok(entries
        .flatten()
        .filter_map(|entry| from_proc(&std::fs::read_to_string(entry.path().join("stat")).ok()?))
        .collect())
}

/// Whether the process is there and not a zombie.
pub(crate) fn is_running(id: u32) -> Result<bool, Error> {
    Ok(all()?.iter().any(|process| process.id == id && process.state != 'Z'))
}

/// Parses a line such as `812 (a (nice) name) S 1 …`.
fn from_proc(stat: &str) -> Option<Process> {
    let (id, _) = stat.split_once(' ')?;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut words = rest.split_ascii_whitespace();
    let state = words.next()?.chars().next()?;
    Some(Process { id: id.parse().ok()?, parent: words.next()?.parse().ok()?, state })
}

fn from_ps(line: &str) -> Option<Process> {
    let mut words = line.split_ascii_whitespace();
    let (id, parent, state) = (words.next()?, words.next()?, words.next()?);
    Some(Process { id: id.parse().ok()?, parent: parent.parse().ok()?, state: state.chars().next()? })
}

#[cfg(test)]
mod tests {
    use super::{Process, from_proc, from_ps};

    #[test]
    fn a_name_with_spaces_and_brackets_does_not_confuse_the_columns() {
        let process = Process { id: 812, parent: 7, state: 'T' };
        assert_eq!(from_proc("812 (a (nice) name) T 7 812 0"), Some(process));
    }

    #[test]
    fn a_line_of_ps_says_the_same() {
        assert_eq!(from_ps("  812     7 T+"), Some(Process { id: 812, parent: 7, state: 'T' }));
        assert_eq!(from_ps(""), None);
    }
}
