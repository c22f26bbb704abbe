//! Business writes and the record commit together, or not at all.

use actix_web::test::init_service;
use actix_web::{App, HttpResponse, web};
use idem_actix::{IdempotentTransaction, ProblemKind};
use idem_sqlite::SqliteTransaction;

use crate::support::{Database, Runs, eventually, pay, post, send};

type Transaction = IdempotentTransaction<SqliteTransaction>;

#[actix_web::test]
async fn a_transaction_that_the_handler_leaves_in_the_request_is_rolled_back() {
    use actix_web::{HttpMessage, HttpRequest};
    let (database, runs) = (Database::new().await, Runs::default());
    let handler = {
        let runs = runs.clone();
        move |request: HttpRequest, mut transaction: Transaction| {
            let run = runs.next();
            async move {
                pay(&mut transaction).await;
                if run == 1 {
                    request.extensions_mut().insert(transaction);
                }
                HttpResponse::Created().body(format!("run {run}"))
            }
        }
    };
    let app = init_service(App::new().wrap(database.layer()).route("/p", web::post().to(handler))).await;
    send(&app, post("/p", "k")).await.assert_problem(ProblemKind::HandlerFailed);
    let next = eventually("the release of the key", async || {
        Some(send(&app, post("/p", "k")).await).filter(|answer| answer.problem != Some(ProblemKind::InProgress))
    });
    next.await.assert_run(2);
    assert_eq!((runs.count(), database.payments().await), (2, 1));
}
