//! How an image is made of a folder.

use std::error::Error;
use std::path::Path;

use super::MADE_OF;
use crate::command;
use crate::docker::docker;

/// Makes an image of a folder with a `Dockerfile`.
///
/// Its commands use the network of this machine, and so the mirror of Debian that this machine is set up for.
pub(super) fn image(
    name: &str,
    folder: &Path,
    arguments: &[(&str, &str)],
    made_of: &str,
) -> Result<(), Box<dyn Error>> {
    let mut build = docker(&["build", "--quiet", "--network", "host", "--tag", name]);
    build.args(["--label", &format!("{MADE_OF}={made_of}")]);
    for (argument, value) in arguments {
        build.args(["--build-arg", &format!("{argument}={value}")]);
    }
    // Docker knows them by name, and leaves them out of the image.
    for variable in ["http_proxy", "https_proxy", "no_proxy"] {
        if std::env::var_os(variable).is_some() {
            build.args(["--build-arg", variable]);
        }
    }
    // Its newer builder is a plugin, without which it does not fall back by itself.
    if docker(&["buildx", "version"]).output().is_ok_and(|output| !output.status.success()) {
        build.env("DOCKER_BUILDKIT", "0");
    }
    command::output_of(build.arg(folder)).map(drop)
}
