//! `cargo xtask images`: builds images for `cargo xtask test-containers`, for machines without access to the official ones.

mod build;
mod debian;
mod example;

use std::error::Error;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::command::{self, workspace};
use crate::docker;

pub(crate) use example::provide as provide_example;

/// The images that are made of Debian's packages, by the folders with their instructions.
const SERVERS: [&str; 4] = ["postgres", "redis", "pgbouncer", "mariadb"];

/// Those whose packages this release does not have, but later ones.
const LATER: (&str, [&str; 1]) = ("bookworm", ["valkey"]);

/// The common prefix of our image names, which no registry has.
const FAMILY: &str = "idem-test";

/// The label with the digest of an image's sources.
const MADE_OF: &str = "idem-test.made-of";

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Rebuilds existing images too, for newer packages.
    #[arg(long)]
    again: bool,
    /// Another Debian release than this machine's, such as `trixie`; its name becomes the tag of the images.
    #[arg(long, value_parser = release)]
    release: Option<String>,
}

/// Checks the name of a release, which becomes a part of an address and a tag.
fn release(name: &str) -> Result<String, String> {
    let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase());
    if is_name { Ok(name.into()) } else { Err("a release of Debian has a name such as trixie".into()) }
}

/// Builds the missing images, and prints which they are.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    docker::expect_engine()?;
    let base = debian::provide(options.release.as_deref(), options.again)?;
    let tag = options.release.as_deref().unwrap_or("latest");
    let (before, later) = LATER;
    let later = later.into_iter().filter(|_| !base.ends_with(before));
    for server in SERVERS.into_iter().chain(later) {
        let began = Instant::now();
        let folder = workspace().join("tests/containers/images").join(server);
        let name = format!("{FAMILY}/{server}:{tag}");
        let made_of = digest([folder.join("Dockerfile"), folder.join("entrypoint")], &docker::id_of(&base)?)?;
        if !options.again && docker::label_of(&name, MADE_OF).as_deref() == Some(&made_of) {
            println!("{name}: there already, {}", docker::size_of(&name)?);
            continue;
        }
        build::image(&name, &folder, &[("BASE", &base)], &made_of)?;
        println!("{name}: made in {} s, {}", began.elapsed().as_secs(), docker::size_of(&name)?);
    }
    provide_example()
}

/// A digest of an image's sources, to detect changes. It need not be cryptographic.
fn digest(files: impl IntoIterator<Item = PathBuf>, more: &str) -> Result<String, Box<dyn Error>> {
    let mut hasher = DefaultHasher::new();
    hasher.write(more.as_bytes());
    for path in files {
        hash_file(&mut hasher, &path).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(format!("{:016x}", hasher.finish()))
}

fn hash_file(hasher: &mut DefaultHasher, path: &Path) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let mut part = vec![0; 1 << 16];
    loop {
        match file.read(&mut part)? {
            0 => return Ok(()),
            length => hasher.write(&part[..length]),
        }
    }
}

/// Installs a program, or fails with installation advice.
fn expect_program(program: &str, package: &str) -> Result<(), Box<dyn Error>> {
    if idem_servers::find_program(program).is_some() {
        return Ok(());
    }
    if command::may_install() {
        println!("{program}: missing, so Debian's package {package} is installed");
        return command::install(&[package]);
    }
    Err(format!("{program} is missing, which makes images; install it (Debian's package is {package})").into())
}
