//! Checks of a change besides the tests.

use std::error::Error;

use crate::command::{cargo, output_of, require_cargo_tool, run, workspace};
use crate::gates::published::published;

pub(crate) fn format() -> Result<(), Box<dyn Error>> {
    run(&mut cargo(&["fmt", "--all", "--", "--check"]))?;
    run(cargo(&["fmt", "--", "--check"]).current_dir(workspace().join("bench")))
}

pub(crate) fn lints() -> Result<(), Box<dyn Error>> {
    run(&mut cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"]))?;
    run(cargo(&["clippy", "--all-targets", "--", "-D", "warnings"]).current_dir(workspace().join("bench")))
}

pub(crate) fn documentation() -> Result<(), Box<dyn Error>> {
    let mut command = cargo(&["doc", "--workspace", "--all-features", "--no-deps"]);
    run(command.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Checks that the core, without features, depends on no runtime, no HTTP and no database.
pub(crate) fn core_is_pure() -> Result<(), Box<dyn Error>> {
    const BANNED: [&str; 8] = ["tokio", "http", "hyper", "sqlx", "redis", "axum", "actix-web", "tower"];
    let tree = output_of(&mut cargo(&["tree", "-p", "idem-core", "-e", "normal", "--prefix", "none"]))?;
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    let impure: Vec<&str> = names.filter(|name| BANNED.iter().any(|banned| name.starts_with(banned))).collect();
    if impure.is_empty() { Ok(()) } else { Err(format!("idem-core depends on {}", impure.join(", ")).into()) }
}

pub(crate) fn mutants() -> Result<(), Box<dyn Error>> {
    require_cargo_tool("mutants")?;
    let mut command = cargo(&["mutants", "-p", "idem-core", "--jobs", "2"]);
    command.env("PROPTEST_CASES", "64");
    println!("> cargo mutants -p idem-core --jobs 2");
    // Status 3: all were caught, some only because they looped forever.
    match command.status()?.code() {
        Some(0 | 3) => Ok(()),
        status => Err(format!("some mutants were not caught (status {status:?}); see mutants.out").into()),
    }
}

/// Files that packages embed from top-level folders: the crate, its symbolic link, and a file behind the link.
const EMBEDDED: &[(&str, &str, &str)] = &[
    ("idem-sqlite", "migrations", "0001_records.sql"),
    ("idem-mysql", "migrations", "0001_records.sql"),
    ("idem-postgres", "migrations", "0002_verbs.sql"),
    ("idem-postgres", "migrations", "partitions.sql"),
    ("idem-redis", "lua", "look.lua"),
    ("idem-redis", "lua", "settle.lua"),
    ("idem-redis", "lua", "fast_put.lua"),
];

/// Packs all published crates and builds them from their archives. The archive of a crate that embeds SQL must carry it.
pub(crate) fn packages() -> Result<(), Box<dyn Error>> {
    let packages = published()?;
    // Cargo builds each package from the archives of the others, so none needs a release of another.
    let mut command = cargo(&["package", "--allow-dirty"]);
    run(command.args(packages.iter().flat_map(|package| ["-p", &package.name])))?;
    for (package, folder, file) in EMBEDDED {
        let list = output_of(&mut cargo(&["package", "--allow-dirty", "--list", "-p", package]))?;
        let path = format!("{folder}/{file}");
        if !list.lines().any(|line| line == path) {
            return Err(format!("the package {package} does not carry {path}").into());
        }
        if !std::fs::symlink_metadata(workspace().join("crates").join(package).join(folder))?.is_symlink() {
            return Err(format!("{package}/{folder} is not a link to the folder at the top").into());
        }
        println!("{package} carries {path}");
    }
    Ok(())
}
