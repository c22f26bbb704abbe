//! Builds an image from a folder.

use std::error::Error;
use std::path::Path;

use super::MADE_OF;
use crate::command;
use crate::docker::docker;

/// Builds an image from a folder with a `Dockerfile`.
///
/// Its commands use the network of this machine, and so the Debian mirror of this machine.
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
    // Docker predefines these build arguments, and leaves them out of the image.
    for variable in ["http_proxy", "https_proxy", "no_proxy"] {
        if std::env::var_os(variable).is_some() {
            build.args(["--build-arg", variable]);
        }
    }
    // The newer builder is a plugin. Without the plugin, Docker does not fall back automatically.
    if docker(&["buildx", "version"]).output().is_ok_and(|output| !output.status.success()) {
        build.env("DOCKER_BUILDKIT", "0");
    }
    command::output_of(build.arg(folder)).map(drop)
}
