//! The base image of all servers: the smallest Debian that can install packages.

use std::error::Error;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use tempfile::TempDir;

use super::{FAMILY, expect_program};
use crate::command::{self, output_of};
use crate::docker::{self, docker};

/// The defaults for a machine that does not run Debian.
const RELEASE: &str = "bookworm";
const MIRROR: &str = "http://deb.debian.org/debian";

/// Makes the image of a release, by default that of this machine, unless it exists; returns its name.
pub(super) fn provide(release: Option<&str>, again: bool) -> Result<String, Box<dyn Error>> {
    let began = Instant::now();
    let (mirror, own_release) = source();
    let release = release.map_or(own_release, str::to_owned);
    let name = format!("{FAMILY}/debian:{release}");
    if !again && docker::has_image(&name) {
        println!("{name}: there already, {}", docker::size_of(&name)?);
        return Ok(name);
    }
    expect_program("debootstrap", "debootstrap")?;
    let folder = TempDir::with_prefix("idem-debian-")?;
    let root = folder.path().join("root");
    println!("{name}: from {mirror}");
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--variant=minbase", &release]).arg(&root).arg(&mirror);
    output_of(&mut debootstrap).map_err(|error| format!("{error}\n(debootstrap has to run as root)"))?;
    // Packages would start their servers at installation; this policy prevents it.
    std::fs::write(root.join("usr/sbin/policy-rc.d"), "#!/bin/sh\nexit 101\n")?;
    command::run(Command::new("chmod").arg("+x").arg(root.join("usr/sbin/policy-rc.d")))?;
    import(&root, &name)?;
    println!("{name}: made in {} s, {}", began.elapsed().as_secs(), docker::size_of(&name)?);
    Ok(name)
}

/// The mirror and the release of this machine.
fn source() -> (String, String) {
    let mut apt = Command::new("apt-get");
    apt.args(["indextargets", "--format", "$(SITE) $(CODENAME)"]);
    apt.args(["Origin: Debian", "Label: Debian", "Component: main", "Created-By: Packages"]);
    let printed = apt.stderr(Stdio::null()).output().map(|output| output.stdout).unwrap_or_default();
    first_release(&String::from_utf8_lossy(&printed)).unwrap_or_else(|| (MIRROR.into(), RELEASE.into()))
}

/// The first target that is a whole release, and not updates of one.
fn first_release(targets: &str) -> Option<(String, String)> {
    let mut targets = targets.lines().filter_map(|line| line.split_once(' '));
    let (mirror, release) = targets.find(|(_, release)| !release.is_empty() && !release.contains('-'))?;
    Some((mirror.into(), release.into()))
}

fn import(root: &Path, name: &str) -> Result<(), Box<dyn Error>> {
    let mut tar = Command::new("tar").arg("-C").arg(root).args(["-c", "."]).stdout(Stdio::piped()).spawn()?;
    let archive = tar.stdout.take().ok_or("tar has no output")?;
    let imported = output_of(docker(&["import", "-", name]).stdin(archive));
    let status = tar.wait()?;
    imported?;
    if status.success() { Ok(()) } else { Err(format!("tar: {status}").into()) }
}

#[cfg(test)]
mod tests {
    use super::first_release;

    #[test]
    fn the_release_of_this_machine_is_the_first_that_is_whole() {
        let targets = "http://mirror/debian bookworm-updates\nhttp://mirror/debian bookworm\nhttp://other trixie\n";
        assert_eq!(first_release(targets), Some(("http://mirror/debian".into(), "bookworm".into())));
        assert_eq!(first_release("http://mirror/debian \n"), None);
        assert_eq!(first_release(""), None);
    }
}
