//! A database in which another role has set its traps.

use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, Row as _};

use super::names;
use crate::support::{connection, sql};

/// Counts the traps that spring, by a sequence for each: a rollback does not take back a sequence's value.
const LOOT: &str = r"
    CREATE FUNCTION loot.ran(what text) RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog AS $$
    BEGIN
        IF current_user <> '{thief}' THEN
            PERFORM nextval(format('loot.%I', what)::regclass);
        END IF;
        RETURN TRUE;
    END $$;
    CREATE FUNCTION loot.prepare(what text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS $$
    BEGIN
        EXECUTE format('CREATE SEQUENCE IF NOT EXISTS loot.%I', what);
        EXECUTE format('GRANT ALL ON SEQUENCE loot.%I TO PUBLIC', what);
    END $$;
    CREATE FUNCTION loot.types() RETURNS text[] LANGUAGE sql AS $$
        SELECT ARRAY['text', 'name', 'bytea', 'int2', 'int4', 'int8', 'bool', 'numeric', 'float8', 'timestamptz',
            'text[]', 'bytea[]', 'int8[]', 'regclass', 'oid']
    $$;
";

/// Functions of these names. They take all arguments by ones and twos, and all that are one type away from the arguments of a
/// function in the schema.
const FUNCTIONS: &str = r"
    DO $do$
    DECLARE
        called record;
        signature text;
    BEGIN
        FOR called IN
            SELECT proname::text AS name, (array_agg(
                CASE WHEN typtype = 'p' THEN 'text' ELSE format_type(prorettype, NULL) END ORDER BY prorettype
            ))[1] AS result
            FROM pg_proc JOIN pg_type ON pg_type.oid = prorettype
            WHERE pronamespace = '{schema}'::regnamespace AND proname = ANY (string_to_array('{words}', ' '))
            GROUP BY proname
        LOOP
            PERFORM loot.prepare(called.name);
            FOR signature IN
                SELECT ''
                UNION SELECT one FROM unnest(loot.types()) AS one
                UNION SELECT one || ',' || other FROM unnest(loot.types()) AS one, unnest(loot.types()) AS other
                UNION SELECT 'VARIADIC ' || one FROM unnest(loot.types()) AS one WHERE one LIKE '%[]'
                UNION SELECT string_agg(
                    CASE WHEN place = replaced AND other <> '' THEN other ELSE format_type(type, NULL) END, ',' ORDER BY place
                )
                FROM (
                    SELECT pg_proc.oid, place, type, pronargs
                    FROM pg_proc, unnest(proargtypes) WITH ORDINALITY AS arguments (type, place)
                    WHERE pronamespace = '{schema}'::regnamespace AND proname = called.name
                ) AS arguments, generate_series(1, pronargs) AS replaced, unnest(array_append(loot.types(), '')) AS other
                GROUP BY oid, replaced, other
                HAVING bool_and(type NOT IN (SELECT oid FROM pg_type WHERE typtype = 'p' AND typname NOT LIKE 'any_%'))
            LOOP
                EXECUTE format(
                    'CREATE OR REPLACE FUNCTION public.%I(%s) RETURNS %s LANGUAGE sql VOLATILE AS %L', called.name,
                    signature, called.result,
                    format('SELECT CASE WHEN loot.ran(%L) THEN NULL::%s END', called.name, called.result)
                );
            END LOOP;
        END LOOP;
    END $do$;
";

/// The operators, between all types.
const OPERATORS: &str = r"
    DO $do$
    DECLARE
        called record;
    BEGIN
        FOR called IN
            SELECT operator, one, other,
                CASE WHEN operator ~ '^[<>=!~]+$' THEN 'bool' ELSE coalesce(one, other) END AS result
            FROM (SELECT DISTINCT oprname::text FROM pg_operator WHERE oprname = ANY (string_to_array('{operators}', ' ')))
                AS operators (operator),
                unnest(array_append(loot.types(), NULL)) AS one, unnest(loot.types()) AS other
            WHERE one IS NOT NULL OR operator IN ('-', '+', '@', '~')
        LOOP
            PERFORM loot.prepare(called.operator);
            EXECUTE format(
                'CREATE FUNCTION loot.%I(%s) RETURNS %s LANGUAGE sql VOLATILE AS %L', 'op' || called.operator,
                concat_ws(',', called.one, called.other), called.result,
                format('SELECT CASE WHEN loot.ran(%L) THEN NULL::%s END', called.operator, called.result)
            );
            EXECUTE format(
                'CREATE OPERATOR public.%s (%s RIGHTARG = %s, FUNCTION = loot.%I)', called.operator,
                'LEFTARG = ' || called.one || ',', called.other, 'op' || called.operator
            );
        END LOOP;
    END $do$;
";

/// Relations and types of these names.
const RELATIONS_AND_TYPES: &str = r"
    DO $do$
    DECLARE
        called text;
        base text;
    BEGIN
        FOR called IN
            SELECT relname FROM pg_class
            WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
                AND relname = ANY (string_to_array('{words}', ' '))
        LOOP
            PERFORM loot.prepare(called);
            EXECUTE format('CREATE VIEW public.%I AS SELECT * FROM pg_catalog.%1$I WHERE loot.ran(%1$L)', called);
        END LOOP;
        FOR called IN SELECT word FROM unnest(string_to_array('{words}', ' ')) AS word WHERE word ~ '^idem_' LOOP
            PERFORM loot.prepare(called);
            EXECUTE format('CREATE VIEW public.%I AS SELECT WHERE loot.ran(%1$L)', called);
        END LOOP;
        GRANT ALL ON ALL TABLES IN SCHEMA public TO PUBLIC;
        FOR called, base IN
            SELECT typname, CASE typtype WHEN 'p' THEN 'text' ELSE typname END FROM pg_type
            WHERE typnamespace = 'pg_catalog'::regnamespace AND typrelid = 0 AND typname = ANY (string_to_array('{words}', ' '))
        LOOP
            PERFORM loot.prepare(called);
            EXECUTE format('CREATE DOMAIN public.%I AS pg_catalog.%s CHECK (loot.ran(%1$L))', called, base);
        END LOOP;
    END $do$;
";

/// A separate database, with the role of a store and a hostile role.
pub struct Hostile {
    name: String,
    admin: PgConnectOptions,
}

impl Hostile {
    /// Sets the traps. `path` is the search path of the store's role.
    pub async fn new(path: &str) -> Self {
        let name = format!("hostile_{}", uuid::Uuid::new_v4().simple());
        let mut admin = connection().await;
        sql(&mut admin, format!("CREATE ROLE {name}_thief LOGIN;CREATE ROLE {name}_store LOGIN")).await;
        sql(&mut admin, format!("CREATE DATABASE {name}")).await;
        let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
        let hostile = Self { admin: options.database(&name).disable_statement_logging(), name };
        let mut admin = hostile.admin.connect().await.unwrap();
        let layout = "GRANT CREATE ON SCHEMA public TO PUBLIC;CREATE SCHEMA loot AUTHORIZATION {0}_thief;
            GRANT USAGE ON SCHEMA loot TO PUBLIC;GRANT CREATE ON DATABASE {0} TO {0}_store;
            CREATE SCHEMA app AUTHORIZATION {0}_store;CREATE TABLE app.effects (key BYTEA);
            ALTER TABLE app.effects OWNER TO {0}_store;REVOKE ALL ON SCHEMA app FROM PUBLIC";
        sql(&mut admin, layout.replace("{0}", &hostile.name)).await;
        hostile.set_path(path).await;
        let mut thief = hostile.admin.clone().username(&format!("{}_thief", hostile.name)).connect().await.unwrap();
        let words = names::words().into_iter().collect::<Vec<_>>().join(" ");
        let operators = names::operators().into_iter().collect::<Vec<_>>().join(" ");
        sql(&mut thief, "SET search_path = pg_catalog;SET check_function_bodies = off").await;
        for traps in [LOOT, FUNCTIONS, OPERATORS, RELATIONS_AND_TYPES] {
            let traps = traps.replace("{thief}", &format!("{}_thief", hostile.name)).replace("{words}", &words);
            sql(&mut thief, traps.replace("{operators}", &operators).replace("{schema}", "pg_catalog")).await;
        }
        hostile
    }

    /// Sets traps for the functions of the store itself, once they are there.
    pub async fn copy_functions_of(&self, schema: &str) {
        let mut thief = self.admin.clone().username(&format!("{}_thief", self.name)).connect().await.unwrap();
        let words = names::words().into_iter().collect::<Vec<_>>().join(" ");
        sql(&mut thief, "SET search_path = pg_catalog;SET check_function_bodies = off").await;
        sql(&mut thief, FUNCTIONS.replace("{schema}", schema).replace("{words}", &words)).await;
    }

    pub async fn set_path(&self, path: &str) {
        let mut admin = self.admin.connect().await.unwrap();
        sql(&mut admin, format!("ALTER ROLE {}_store SET search_path = {path}", self.name)).await;
    }

    /// How the store's role connects.
    pub fn store(&self) -> PgConnectOptions {
        self.admin.clone().username(&format!("{}_store", self.name))
    }

    pub async fn connection(&self) -> PgConnection {
        self.store().connect().await.unwrap()
    }

    /// Runs a statement as the store's role, and ignores its result.
    pub async fn run(&self, statement: &str) {
        let _ = sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).fetch_all(&mut self.connection().await).await;
    }

    /// Runs a query as a superuser, on a search path without traps.
    pub async fn ask(&self, question: &str) -> Vec<PgRow> {
        let mut admin = self.admin.connect().await.unwrap();
        sql(&mut admin, "SET search_path = pg_catalog").await;
        sql(&mut admin, question).await
    }

    /// The names of the traps that ran as another role than the one that set them.
    pub async fn loot(&self) -> Vec<String> {
        let sprung = "SELECT sequencename::text FROM pg_sequences WHERE schemaname = 'loot' AND last_value IS NOT NULL";
        self.ask(sprung).await.iter().map(|row| row.get(0)).collect()
    }

    /// Drops a store's schema.
    pub async fn remove(&self, schema: &str) {
        self.ask(&format!("DROP SCHEMA {schema} CASCADE")).await;
    }

    pub async fn clear(&self) {
        let clear = "SELECT setval(format('loot.%I', sequencename)::regclass, 1, FALSE) FROM pg_sequences
            WHERE schemaname = 'loot'";
        self.ask(clear).await;
    }

    pub async fn drop(self) {
        let (name, mut admin) = (&self.name, connection().await);
        sql(&mut admin, format!("DROP DATABASE {name} WITH (FORCE)")).await;
        sql(&mut admin, format!("DROP ROLE {name}_thief;DROP ROLE {name}_store")).await;
    }
}
