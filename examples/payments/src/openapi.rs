//! The description of the service in OpenAPI, the same for every framework.

use idem_http::HttpPolicy;
use utoipa::openapi::path::{
    HttpMethod, Operation, OperationBuilder, ParameterBuilder, ParameterIn, PathItem, PathsBuilder,
};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{ComponentsBuilder, ObjectBuilder, SchemaFormat, Type};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, InfoBuilder, OpenApi, OpenApiBuilder, Ref, Required, Response, ResponseBuilder};
use utoipa::{PartialSchema, ToSchema};

use crate::ledger::{NewPayment, Payment, Quote, Totals};
use crate::service::{DESCRIPTION, HEALTH, LEDGER, PAYMENT, PAYMENTS, QUOTES};

/// The pages of the API. Those for tests, and what a browser shows, are not part of it.
pub(crate) fn describe(payments: &HttpPolicy, quotes: &HttpPolicy) -> OpenApi {
    let get = |operation: Operation| PathItem::new(HttpMethod::Get, operation);
    let mut page = get(list_payments());
    page.post = Some(create_payment(payments));
    let paths = PathsBuilder::new()
        .path(PAYMENTS.0, page)
        .path(QUOTES.0, PathItem::new(HttpMethod::Post, make_quote(quotes)))
        .path(PAYMENT.0, get(show_payment()))
        .path(LEDGER.0, get(show_ledger()))
        .path(HEALTH.0, get(OperationBuilder::new().response("200", open_json("The service answers.")).build()))
        .path(DESCRIPTION.0, get(OperationBuilder::new().response("200", open_json("This document.")).build()));
    let components = ComponentsBuilder::new()
        .schema(NewPayment::name(), NewPayment::schema())
        .schema(Payment::name(), Payment::schema())
        .schema(Quote::name(), Quote::schema())
        .schema(Totals::name(), Totals::schema())
        .security_scheme("tenant", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)));
    let info = InfoBuilder::new().title("payments").version(env!("CARGO_PKG_VERSION"));
    OpenApiBuilder::new().info(info).paths(paths).components(Some(components.build())).build()
}

/// The one operation that moves money.
fn create_payment(policy: &HttpPolicy) -> Operation {
    let operation = of_payment("Makes a payment, once for each idempotency key");
    protected(policy, operation.response("201", json::<Payment>("The payment was made.")))
}

fn make_quote(policy: &HttpPolicy) -> Operation {
    let operation =
        of_payment("What a payment would cost; the same quote for the same idempotency key, if there is one");
    protected(policy, operation.response("201", json::<Quote>("The quote.")))
}

/// Adds what the layer in front of an operation answers.
fn protected(policy: &HttpPolicy, operation: OperationBuilder) -> Operation {
    let mut operation = operation.build();
    policy.describe(&mut operation);
    operation
}

fn of_payment(summary: &str) -> OperationBuilder {
    let body =
        RequestBodyBuilder::new().content("application/json", schema_of::<NewPayment>()).required(Some(Required::True));
    of_tenant(summary)
        .request_body(Some(body.build()))
        .response("422", problem("It is no payment, or the idempotency key belongs to a different request."))
}

fn list_payments() -> Operation {
    let page = of_tenant("All payments of the tenant, oldest first");
    page.response("200", open_json("The payments.")).response("401", problem("There is no tenant.")).build()
}

fn show_payment() -> Operation {
    let id = ObjectBuilder::new().schema_type(Type::String).format(Some(SchemaFormat::Custom("uuid".into())));
    let id =
        ParameterBuilder::new().name("id").parameter_in(ParameterIn::Path).required(Required::True).schema(Some(id));
    of_tenant("One payment of the tenant")
        .parameter(id)
        .response("200", json::<Payment>("The payment."))
        .response("401", problem("There is no tenant."))
        .response("404", problem("There is no such payment."))
        .build()
}

fn show_ledger() -> Operation {
    let page = of_tenant("How often the tenant's money moved, and how much");
    page.response("200", json::<Totals>("The totals.")).response("401", problem("There is no tenant.")).build()
}

fn of_tenant(summary: &str) -> OperationBuilder {
    let tenant = SecurityRequirement::new("tenant", Vec::<String>::new());
    OperationBuilder::new().summary(Some(summary)).security(tenant)
}

fn schema_of<T: ToSchema>() -> Content {
    Content::new(Some(Ref::from_schema_name(T::name())))
}

fn json<T: ToSchema>(description: &str) -> Response {
    ResponseBuilder::new().description(description).content("application/json", schema_of::<T>()).build()
}

/// An object without further description.
fn open_json(description: &str) -> Response {
    let object = ObjectBuilder::new().schema_type(Type::Object).build();
    let content = Content::new(Some(utoipa::openapi::Schema::Object(object)));
    ResponseBuilder::new().description(description).content("application/json", content).build()
}

fn problem(description: &str) -> Response {
    let content =
        Content::new(Some(utoipa::openapi::Schema::Object(ObjectBuilder::new().schema_type(Type::Object).build())));
    ResponseBuilder::new().description(description).content("application/problem+json", content).build()
}
