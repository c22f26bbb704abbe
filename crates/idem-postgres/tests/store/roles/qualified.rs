//! Names in the store's SQL that the search path of a session could give another meaning.

use std::time::Duration;

use idem_postgres::{PostgresStore, migrations, partitioning};
use sqlx::{AssertSqlSafe, Row as _};

use super::names::source_files;
use crate::support::{Configure as _, Schema, connection, sql};

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn every_function_has_a_path_of_its_own_or_names_that_say_their_schema() {
    let schema = Schema::new();
    PostgresStore::open(schema.config().partitioned(HOUR)).await.unwrap();
    let functions = format!(
        "SELECT proname::TEXT, prosqlbody IS NOT NULL, coalesce('search_path=pg_catalog, pg_temp' = ANY (proconfig), FALSE),
            proconfig IS NULL, prosrc
         FROM pg_proc WHERE pronamespace = '{}'::REGNAMESPACE",
        schema.name
    );
    let functions = sql(&mut connection().await, functions).await;
    assert!(functions.len() > 15);
    for function in functions {
        let name: String = function.get(0);
        let (is_bound, has_path, can_be_inlined): (bool, bool, bool) =
            (function.get(1), function.get(2), function.get(3));
        let is_qualified = !is_bound && unqualified(function.get(4)).is_empty();
        assert!(is_bound || has_path || is_qualified, "{name} runs in the path of its caller");
        assert!(!is_bound || can_be_inlined, "{name} is not inlined");
    }
}

#[tokio::test]
async fn a_migration_that_is_applied_statement_by_statement_fails_before_it_creates_anything() {
    let mut texts: Vec<_> = migrations("idem").unwrap().into_iter().map(|migration| migration.sql).collect();
    texts.push(partitioning("idem", HOUR).unwrap());
    for text in texts {
        let (path, _) = text.split_once("$$;\n").unwrap();
        let mut tool = connection().await;
        let statements: Vec<_> = path.splitn(3, ";\n").collect();
        for statement in &statements[..2] {
            sql(&mut tool, *statement).await;
        }
        let check = format!("{}$$", statements[2]);
        let error = sqlx::raw_sql(AssertSqlSafe(check)).execute(&mut tool).await.unwrap_err();
        assert!(error.to_string().contains("in one transaction"), "{error}");
        assert!(!path.contains("CREATE"), "{path}");
    }
}

#[test]
fn every_statement_of_the_crate_says_which_schema_it_means() {
    let mut statements = 0;
    for file in source_files() {
        let source = std::fs::read_to_string(&file).unwrap();
        let source = source.split("#[cfg(test)]").next().unwrap();
        for text in literals(source).iter().filter(|text| is_sql(text)) {
            statements += 1;
            let wrong = unqualified(text);
            assert!(wrong.is_empty(), "{}: {wrong:?} in {text:?}", file.display());
        }
    }
    assert!(statements > 50, "only {statements} statements were found");
}

#[test]
fn names_that_the_path_gives_a_meaning_are_found() {
    for (statement, wrong) in [
        ("SELECT now()", "now("),
        ("SELECT count (*) FROM x.y", "count("),
        ("SELECT 1 WHERE 'a' = 'b'", "="),
        ("SELECT a||b", "||"),
        ("SELECT x::TEXT", "::TEXT"),
        ("SELECT x::bytea[]", "::bytea"),
        ("SELECT FROM pg_class", "FROM pg_class"),
        ("SELECT a JOIN pg_class ON TRUE", "JOIN pg_class"),
        ("WHERE a LIKE 'b'", "LIKE"),
        ("WHERE a IN (SELECT 1)", "IN"),
        ("SELECT CASE a WHEN 1 THEN 2 END", "CASE a"),
    ] {
        assert_eq!(unqualified(statement), [wrong], "{statement}");
    }
    let right = "/* a = b */ SET LOCAL a=b;SELECT *, coalesce(pg_catalog.max(a), 0)::BIGINT, x.* FROM pg_catalog.pg_class AS a (b) \
         JOIN \"idem\".f('=') ON a OPERATOR(pg_catalog.<>) b::pg_catalog.text WHERE CASE WHEN a THEN b END; \
         WITH c AS (SELECT 1) SELECT FROM c; UPDATE \"idem\".d SET e = 1, f = 2";
    assert_eq!(unqualified(right), Vec::<String>::new());
}

/// The string literals of a source, without escapes of lines and quotes.
fn literals(source: &str) -> Vec<String> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = code.collect::<Vec<_>>().join("\n").replace("'\"'", "").replace("\\\\", "").replace("\\\"", "\u{1}");
    let literals = code.split('"').skip(1).step_by(2);
    literals.map(|text| text.replace('\u{1}', "\"").replace("\\\n", "")).collect()
}

fn is_sql(text: &str) -> bool {
    ["SELECT", "WHERE", "FROM ", "JOIN ", "OPERATOR", "pg_catalog", "SET ", "::"].iter().any(|mark| text.contains(mark))
}

/// Removes the values, which are in single quotes.
fn without_values(text: &str) -> String {
    text.split('\'').step_by(2).collect::<Vec<_>>().join("'")
}

fn without_comments(text: &str) -> String {
    let mut parts = text.split("/*");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.filter_map(|part| part.split_once("*/")).fold(first, |text, (_, rest)| text + rest)
}

/// Removes the operators that say their schema.
fn without_operators(text: &str) -> String {
    let mut parts = text.split("OPERATOR(pg_catalog.");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.filter_map(|part| part.split_once(')')).fold(first, |text, (_, rest)| text + rest)
}

/// Words, names in quotes, runs of operators, and single other characters.
fn tokens(text: &str) -> Vec<String> {
    let class = |character: char| match character {
        '_' | '"' | '.' | '{' | '}' => 1,
        character if character.is_alphanumeric() => 1,
        '=' | '<' | '>' | '|' | '+' | '/' | '%' | '~' | '#' | '!' => 2,
        ':' => 3,
        character if character.is_whitespace() => 4,
        _ => 0,
    };
    let (mut tokens, mut last) = (Vec::<String>::new(), 0);
    for character in text.chars() {
        let class = class(character);
        match tokens.last_mut() {
            Some(token) if class != 0 && class == last => token.push(character),
            _ => tokens.push(character.into()),
        }
        last = class;
    }
    tokens.retain(|token| !token.trim().is_empty());
    tokens
}

/// Names whose meaning the path decides.
fn unqualified(text: &str) -> Vec<String> {
    // Types that the grammar knows, and what only looks like a function.
    const TYPES: [&str; 4] = ["BIGINT", "SMALLINT", "INTEGER", "BOOLEAN"];
    const GRAMMAR: [&str; 3] = ["coalesce", "greatest", "least"];
    let tokens = tokens(&without_operators(&without_comments(&without_values(text))));
    let at = |place: usize| tokens.get(place).map_or("", String::as_str);
    // What WITH gives a name goes before all tables.
    let is_of_statement = |name: &str| {
        tokens.windows(3).any(|with| with[0] == name && with[1] == "AS" && matches!(&*with[2], "MATERIALIZED" | "("))
    };
    let is_name = |token: &str| token.starts_with(|first: char| first.is_ascii_lowercase());
    let mut wrong = Vec::new();
    for (place, token) in tokens.iter().enumerate() {
        let (before, next) = (if place == 0 { "" } else { at(place - 1) }, at(place + 1));
        let is_setting = place > 1 && ["SET", "LOCAL"].iter().any(|word| at(place - 2).ends_with(word));
        // The columns that UPDATE sets.
        let is_assignment = place > 1 && at(place - 2) == "," && tokens[..place].iter().any(|token| token == "UPDATE");
        let is_qualified = token.contains('.') || token.contains(['{', '"']);
        match token.as_str() {
            token if is_name(token) && next == "(" && !is_qualified && before != "AS" && !GRAMMAR.contains(&token) => {
                wrong.push(format!("{token}("));
            }
            "::" if !TYPES.contains(&next) && !next.starts_with("pg_catalog.") => wrong.push(format!("::{next}")),
            "FROM" | "JOIN" if is_name(next) && !next.contains(['.', '{']) && !is_of_statement(next) => {
                wrong.push(format!("{token} {next}"))
            }
            "LIKE" | "BETWEEN" | "NULLIF" | "SIMILAR" => wrong.push(token.clone()),
            "IN" if next == "(" => wrong.push(token.clone()),
            "CASE" if next != "WHEN" => wrong.push(format!("CASE {next}")),
            operator
                if operator.starts_with(['=', '<', '>', '|', '+', '/', '%', '~', '#', '!'])
                    && !is_setting
                    && !is_assignment =>
            {
                wrong.push(operator.to_owned());
            }
            _ => {}
        }
    }
    wrong
}
