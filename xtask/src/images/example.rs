//! The image of the example: its program, and the libraries of this machine that it links to.

use std::error::Error;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use tempfile::TempDir;

use super::{FAMILY, MADE_OF, build, digest};
use crate::command::{self, cargo, output_of};
use crate::docker;

/// The image contains only the copied files, so that the program finds the libraries that it was built with.
const DOCKERFILE: &str = "FROM scratch\nCOPY root/ /\nWORKDIR /data\nUSER 65534:65534\nEXPOSE 8080\n\
    ENTRYPOINT [\"/payments\", \"--listen\", \"0.0.0.0:8080\"]\n";

/// Builds the example and its image, unless the image exists.
pub(crate) fn provide() -> Result<(), Box<dyn Error>> {
    let began = Instant::now();
    let name = format!("{FAMILY}/payments");
    command::run(&mut cargo(&["build", "--quiet", "-p", "payments", "--features", "simulate"]))?;
    // Cargo has built it in the same folder as this program.
    let program = std::env::current_exe()?.with_file_name("payments");
    let libraries = libraries_in(&output_of(Command::new("ldd").arg(&program))?);
    let made_of = digest(std::iter::once(program.clone()).chain(libraries.iter().cloned()), DOCKERFILE)?;
    if docker::label_of(&name, MADE_OF).as_deref() == Some(&made_of) {
        println!("{name}: there already, {}", docker::size_of(&name)?);
        return Ok(());
    }
    let folder = TempDir::with_prefix("idem-payments-")?;
    let root = folder.path().join("root");
    place(&program, &root.join("payments"))?;
    for library in &libraries {
        place(library, &root.join(library.strip_prefix("/")?))?;
    }
    // A file system mounted there gets these permissions too.
    let data = root.join("data");
    fs::create_dir(&data)?;
    fs::set_permissions(&data, fs::Permissions::from_mode(0o1777))?;
    fs::write(folder.path().join("Dockerfile"), DOCKERFILE)?;
    build::image(&name, folder.path(), &[], &made_of)?;
    println!("{name}: made in {} s, {}", began.elapsed().as_secs(), docker::size_of(&name)?);
    Ok(())
}

/// The loader and the files that it would load. Objects that the kernel provides have no path.
fn libraries_in(printed: &str) -> Vec<PathBuf> {
    let places = printed.lines().map(|line| line.split_once("=>").map_or(line, |(_, place)| place).trim());
    let paths = places.filter(|place| place.starts_with('/')).filter_map(|place| place.split(' ').next());
    paths.map(PathBuf::from).collect()
}

/// Copies a file with its permissions; symbolic links are followed.
fn place(from: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::copy(from, to).map_err(|error| format!("copy {}: {error}", from.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::libraries_in;

    #[test]
    fn the_libraries_and_the_loader_are_found() {
        let printed = "\tlinux-vdso.so.1 (0x00007fff)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = [Path::new("/lib/x86_64-linux-gnu/libc.so.6"), Path::new("/lib64/ld-linux-x86-64.so.2")];
        assert_eq!(libraries_in(printed), expected);
        assert_eq!(libraries_in("\tstatically linked\n"), Vec::<&Path>::new());
    }
}
