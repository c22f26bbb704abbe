//! `idem completions` and `idem man`.

use std::error::Error;
use std::io::Write as _;

use clap::{Args, Command};
use clap_complete::Shell;

use crate::Ended;

/// For which shell.
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell.
    shell: Shell,
}

/// Which page.
#[derive(Debug, Args)]
pub(crate) struct Man {
    /// A command, for a page about it alone.
    command: Option<String>,
}

/// Prints the completions of a shell to standard output.
pub(crate) fn completions(mut command: Command, options: &Completions) -> Result<Ended, Box<dyn Error>> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut command, "idem", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(Ended::Done)
}

/// Prints a page for `man` to standard output.
pub(crate) fn man(mut command: Command, options: &Man) -> Result<Ended, Box<dyn Error>> {
    command.build();
    let page = match &options.command {
        Some(name) => {
            let found = command.find_subcommand(name).ok_or_else(|| format!("there is no command {name}"))?;
            found.clone()
        }
        None => command,
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page).render(&mut text)?;
    std::io::stdout().write_all(&text)?;
    Ok(Ended::Done)
}
