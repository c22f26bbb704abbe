//! A text in JSON as clients send it.

use serde_json::{Value, json};

/// A request such as clients send: short members, numbers, some nesting, in no order.
pub(crate) fn document(bytes: usize) -> Result<Vec<u8>, serde_json::Error> {
    let item = |number: usize| {
        json!({
            "sku": format!("SKU-{number:06}"), "quantity": number % 7 + 1, "price": {"amount": "12.50", "currency": "EUR"},
            "gift": number.is_multiple_of(3), "note": if number.is_multiple_of(5) { Value::Null } else { json!("zur Lieferung am Vormittag") },
            "weight": 0.125 * number as f64,
        })
    };
    let mut items = Vec::new();
    loop {
        let order = json!({
            "reference": "order-4711", "customer": {"name": "A. Example", "email": "a@example.com"}, "items": items,
            "total": 1250, "currency": "EUR", "capture": true,
        });
        let text = serde_json::to_vec(&order)?;
        if text.len() >= bytes {
            return Ok(text);
        }
        items.push(item(items.len()));
    }
}
