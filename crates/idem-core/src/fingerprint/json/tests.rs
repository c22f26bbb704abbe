use super::*;

mod differential;

fn canonical_ignoring(text: &[u8], ignored: &[&str]) -> Option<Vec<u8>> {
    let ignored = ignored.iter().map(|pointer| pointer.parse().unwrap()).collect();
    let mut canonicalizer = JsonCanonicalizer::new(ignored);
    canonicalizer.update(text);
    canonicalizer.finish()
}

fn canonical(text: impl AsRef<[u8]>) -> Option<Vec<u8>> {
    canonical_ignoring(text.as_ref(), &[])
}

#[track_caller]
fn assert_same(texts: &[&str]) {
    let forms: Vec<_> = texts.iter().map(canonical).collect();
    assert!(forms[0].is_some(), "{} is doubtful", texts[0]);
    forms.iter().zip(texts).for_each(|(form, text)| assert_eq!(form, &forms[0], "{text}"));
}

#[track_caller]
fn assert_all_differ(texts: &[&str]) {
    let forms: Vec<_> = texts.iter().map(|text| canonical(text).expect(text)).collect();
    for (at, left) in forms.iter().enumerate() {
        for (further, right) in forms[at + 1..].iter().enumerate() {
            assert_ne!(left, right, "{} and {}", texts[at], texts[at + 1 + further]);
        }
    }
}

#[track_caller]
fn assert_doubtful(texts: &[&str]) {
    texts.iter().for_each(|text| assert_eq!(canonical(text), None, "{text:?}"));
}

/// The canonical form itself is part of version 1.
#[test]
fn the_canonical_form_is_as_documented() {
    let text = r#" { "b" : [ 1 , "x\n" , { } ] , "a" : [ true , false , null ] } "#;
    assert_eq!(canonical(text).unwrap(), b"{\"a\xFF[tfn]\"b\xFF[#1,\"x\n\xFF{}]}");
    assert_eq!(canonical("-1.50e+03").unwrap(), b"#-1.50e+03,");
    assert_eq!(canonical("\"\"").unwrap(), b"\"\xFF");
}

#[test]
fn white_space_does_not_matter() {
    assert_same(&[r#"{"a":[1,{"b":"c"}],"d":true}"#, "\t{ \"a\"\n:\r[ 1 ,{\"b\" : \"c\"} ]\r\n, \"d\": true }\n"]);
    assert_same(&["1", " 1", "1 ", "\r\n\t 1\t\r\n"]);
    assert_same(&["[]", "[ ]", " [\n] "]);
    assert_same(&["{}", "{ }", " {\n} "]);
    assert_all_differ(&[r#"" a""#, r#""a ""#, r#""a""#]);
    // Only the four characters of RFC 8259 section 2 are white space.
    assert_doubtful(&["\u{b}1", "\u{c}1", "\u{a0}1", "1\0", "\u{85}1", "tr ue", "1 2", "1. 0", "- 1", "\"a\"\"b\""]);
}

#[test]
fn member_order_does_not_matter_at_any_level() {
    assert_same(&[
        r#"{"a":1,"b":{"x":[{"p":1,"q":2}],"y":2},"c":3}"#,
        r#"{"c":3,"b":{"y":2,"x":[{"q":2,"p":1}]},"a":1}"#,
        r#"{"b":{"x":[{"q":2,"p":1}],"y":2},"c":3,"a":1}"#,
    ]);
    assert_same(&[r#"{"":0,"a":1,"aa":2,"b":3}"#, r#"{"b":3,"aa":2,"a":1,"":0}"#, r#"{"aa":2,"":0,"b":3,"a":1}"#]);
}

#[test]
fn element_order_and_nesting_matter() {
    assert_all_differ(&["[1,2]", "[2,1]", "[[1],2]", "[[1,2]]", "[1,[2]]", "[12]", "[1]", "[]", "[[]]", "[[],[]]"]);
    assert_all_differ(&[r#"{"a":{"b":1}}"#, r#"{"a":{},"b":1}"#, r#"{"a":"b"}"#, r#"["a","b"]"#, r#"{"b":"a"}"#]);
}

#[test]
fn number_lexemes_are_kept() {
    assert_all_differ(&["9007199254740992", "9007199254740993"]);
    assert_all_differ(&["1", "1.0", "1e0", "1E0", "1e+0", "1e-0", "1e00", "10e-1", "-1"]);
    assert_all_differ(&["0", "-0", "0.0", "0e0", "0E1", "\"0\"", "null", "false", "[0]"]);
    assert_same(&["1e999"]);
}

#[test]
fn strings_are_compared_by_the_characters_they_denote() {
    assert_same(&[r#""a""#, r#""\u0061""#]);
    assert_same(&[r#""/""#, r#""\/""#, r#""\u002f""#, r#""\u002F""#]);
    assert_same(&[r#""\b\f\n\r\t\"\\""#, r#""\u0008\u000c\u000a\u000d\u0009\u0022\u005c""#]);
    assert_same(&["\"\u{e9}\"", r#""\u00e9""#, r#""\u00E9""#]);
    assert_same(&["\"\u{1f600}\"", r#""\ud83d\ude00""#, r#""\uD83D\uDE00""#]);
    assert_same(&["\"\u{10000}\u{10ffff}\"", r#""\ud800\udc00\udbff\udfff""#]);
    assert_same(&["\"\u{d7ff}\u{e000}\u{ffff}\"", r#""\ud7ff\ue000\uffff""#]);
    assert_same(&["{\"a\":{\"\u{e9}\":1}}", r#"{"\u0061":{"\u00e9":1}}"#]);
    // U+00E9 and e with a combining accent look alike and are different characters.
    assert_all_differ(&[r#""\u00e9""#, r#""e\u0301""#, r#""\\u00e9""#, r#""\u0000""#, r#""""#, r#""0""#]);
}

#[test]
fn strings_that_denote_no_characters_are_doubtful() {
    assert_doubtful(&[r#""\ud800""#, r#""\ud83dx""#, r#""\ude00""#, r#""\ude00\ud83d""#, r#""\ud83d\ud83d""#]);
    assert_doubtful(&[r#""\ud83d\n""#, r#""\ud83d\u0061""#, r#""\ud83d\\ude00""#, r#""\udfff""#, r#""\udbff""#]);
    assert_doubtful(&[r#""\x""#, r#""\a""#, r#""\u00g0""#, r#""\u+061""#, r#""\u 061""#, r#""\u006""#, r#""\U0061""#]);
    assert_doubtful(&["\"\0\"", "\"\n\"", "\"\t\"", "\"\u{1f}\"", r#"{"\ud800":1}"#]);
    assert_same(&["\"\u{7f}\"", r#""\u007f""#]);
    for invalid in [&b"\xFF"[..], b"\xC3", b"\xC3\\u00e9", b"\xA9", b"\\u00e9\xA9", b"\xC0\x80", b"\xED\xA0\x80"] {
        assert_eq!(canonical([b"\"", invalid, b"\""].concat()), None, "{invalid:?}");
        assert_eq!(canonical([b"{\"", invalid, b"\":1}"].concat()), None, "{invalid:?} as a name");
    }
}

#[test]
fn duplicate_names_are_doubtful() {
    assert_doubtful(&[r#"{"a":1,"a":1}"#, r#"{"a":1,"b":2,"a":3}"#, r#"{"b":1,"a":2,"b":1}"#, r#"{"":1,"":2}"#]);
    assert_doubtful(&[r#"{"a":1,"\u0061":1}"#, r#"{"c":1,"a":1,"b":1,"\u0061":1}"#, r#"[{"x":{"a":1,"a":1}}]"#]);
    assert_same(&[r#"{"a":{"a":1},"b":{"a":1}}"#]);
    assert_same(&[r#"[{"a":1},{"a":1}]"#]);
}

#[test]
fn what_is_not_json_is_doubtful() {
    assert_doubtful(&[
        "", " ", "{", "[", "\"", "\"a", "\"\\", "\"\\u00", "{\"a", "{\"a\"", "{\"a\":", "{\"a\":1", "[1",
    ]);
    assert_doubtful(&["[1,", "{\"a\":1,", "t", "tru", "nul", "fals", "truex", "True", "nulll", "NaN", "Infinity"]);
    assert_doubtful(&["trux", "tXue", "falsy", "nul!", "[nuLl]", "ttttt"]);
    assert_doubtful(&["]", "}", ",", ":", "[}", "{]", "[1}", "{\"a\":1]", "[1,]", "{\"a\":1,}", "[,1]", "[,]", "{,}"]);
    assert_doubtful(&["[1 2]", "[1,,2]", "{\"a\" 1}", "{\"a\",1}", "{\"a\"::1}", "{\"a\":}", "{a:1}", "{1:1}", "{:1}"]);
    assert_doubtful(&[
        "{}{}",
        "[]]",
        "{}}",
        "[] x",
        "1,",
        "null null",
        "\"a\"b",
        "'a'",
        "{'a':1}",
        "[1:2]",
        "{\"a\":1:2}",
    ]);
    assert_doubtful(&["{\"a\":1 \"b\":2}", "{null:1}", "{[]:1}", "[\"a\":1]", "// c\n1", "1 /* c */", "\u{feff}1"]);
    assert_doubtful(&["{} \u{feff}", "[1]\0", "\0"]);
}

#[test]
fn numbers_outside_the_grammar_are_doubtful() {
    assert_doubtful(&[
        "+1", ".5", "1.", "-", "--1", "-.5", "00", "01", "-01", "1e", "1e+", "1e-", "1E", "1.e1", "1..0",
    ]);
    assert_doubtful(&[
        "1.0.0",
        "1e1e1",
        "1e1.0",
        "0x1",
        "1_0",
        "1a",
        "-a",
        "1+1",
        "1-1",
        "[1.]",
        "{\"a\":-}",
        "1e+-1",
        "0-",
    ]);
    assert_same(&["[0,-0,10,1.5,0.0,1e5,1E+5,-1.25e-17,0e1]"]);
}

#[test]
fn depth_128_is_accepted_and_129_is_doubtful() {
    let arrays = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let objects = |depth: usize| format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth));
    assert!(canonical(arrays(128)).is_some() && canonical(objects(128)).is_some());
    assert_eq!(canonical(arrays(129)), None);
    assert_eq!(canonical(objects(129)), None);
    // Only what is open at the same time counts.
    assert!(canonical(format!("[{0},{0}]", arrays(127))).is_some());
}

#[test]
fn a_doubtful_text_keeps_nothing_in_memory() {
    let mut canonicalizer = JsonCanonicalizer::new(Arc::from([]));
    canonicalizer.update(b"{\"a\":{\"b\":1,\"c\":[oops");
    canonicalizer.update(b"{\"a\":1}");
    assert_eq!((canonicalizer.out.capacity(), canonicalizer.members.capacity()), (0, 0));
    assert_eq!(canonicalizer.containers.capacity(), 0);
    assert_eq!(canonicalizer.finish(), None);
}

#[test]
fn more_members_than_are_held_are_doubtful() {
    let object = |members: usize| {
        let members: Vec<String> = (0..members).map(|at| format!("\"{at}\":1")).collect();
        format!("{{{}}}", members.join(","))
    };
    assert!(canonical(object(MAX_MEMBERS)).is_some());
    assert_eq!(canonical(object(MAX_MEMBERS + 1)), None);
    // The members of all open objects count together; those of a closed object no longer count.
    let half = object(MAX_MEMBERS / 2);
    assert!(canonical(format!("[{half},{half},{half}]")).is_some());
    assert!(canonical(half.replacen('{', &format!("{{\"x\":{half},"), 1)).is_some());
    assert_eq!(canonical(half.replacen('}', &format!(",\"x\":{}}}", object(MAX_MEMBERS / 2 + 1)), 1)), None);
}

#[test]
fn a_long_object_or_array_stands_as_its_digest() {
    // The brackets and two bytes for the string's ends.
    let array = |length: usize| format!("[\"{}\"]", "x".repeat(length - 4));
    assert_eq!(canonical(array(MAX_INLINE)).unwrap().len(), MAX_INLINE);
    let digest = Sha256::digest([b"[\"".as_slice(), &[b'x'; MAX_INLINE - 3], b"\xFF]"].concat());
    assert_eq!(canonical(array(MAX_INLINE + 1)).unwrap(), [b"=".as_slice(), &digest].concat());
    // In order or not.
    let long = "y".repeat(MAX_INLINE);
    let digest = Sha256::digest(
        format!("{{\"a~#1,\"b~\"{long}~}}")
            .into_bytes()
            .iter()
            .map(|&byte| if byte == b'~' { 0xFF } else { byte })
            .collect::<Vec<u8>>(),
    );
    for text in [format!("{{\"a\":1,\"b\":\"{long}\"}}"), format!("{{\"b\":\"{long}\",\"a\":1}}")] {
        assert_eq!(canonical(text).unwrap(), [b"=".as_slice(), &digest].concat());
    }
    // Inside of others.
    assert_same(&[
        &format!(r#"{{"x":{{"a":1,"b":"{long}"}},"w":2}}"#),
        &format!(r#"{{"w":2,"x":{{"b":"{long}","a":1}}}}"#),
    ]);
    assert_doubtful(&[&format!(r#"{{"b":"{long}","a":1,"b":2}}"#)]);
}

#[track_caller]
fn assert_ignored(ignored: &[&str], text: &str, without: &str) {
    let form = canonical_ignoring(text.as_bytes(), ignored);
    assert_eq!(form, canonical(without), "{text} without {ignored:?}");
    assert!(form.is_some(), "{text}");
}

#[test]
fn ignored_members_do_not_count_wherever_they_stand() {
    assert_ignored(&["/a"], r#"{"a":1,"b":2}"#, r#"{"b":2}"#);
    assert_ignored(&["/a"], r#"{"b":2,"a":1}"#, r#"{"b":2}"#);
    assert_ignored(&["/b"], r#"{"c":1,"b":[{"x":{}}],"a":2}"#, r#"{"a":2,"c":1}"#);
    assert_ignored(&["/a"], r#"{"\u0061":1}"#, "{}");
    assert_ignored(&["/a", "/c"], r#"{"a":1,"b":2,"c":3}"#, r#"{"b":2}"#);
    assert_ignored(&["/a/b"], r#"{"a":{"b":1,"c":2},"b":3}"#, r#"{"a":{"c":2},"b":3}"#);
    assert_ignored(&["/a/b", "/a/c/d"], r#"{"a":{"c":{"d":1,"e":2},"b":1}}"#, r#"{"a":{"c":{"e":2}}}"#);
    assert_ignored(&["/a", "/a/b"], r#"{"a":{"b":1},"c":2}"#, r#"{"c":2}"#);
    assert_ignored(&["/"], r#"{"":1,"a":2}"#, r#"{"a":2}"#);
    assert_ignored(&["/a~1b", "/m~0n"], r#"{"a/b":1,"m~n":2,"a":{"b":3}}"#, r#"{"a":{"b":3}}"#);
}

#[test]
fn ignored_elements_are_counted_from_zero() {
    assert_ignored(&["/0"], "[1,2,3]", "[2,3]");
    assert_ignored(&["/1"], "[1,[2],3]", "[1,3]");
    assert_ignored(&["/items/1/at"], r#"{"items":[{"at":1},{"at":2,"b":3}]}"#, r#"{"items":[{"at":1},{"b":3}]}"#);
    assert_ignored(&["/10"], "[0,1,2,3,4,5,6,7,8,9,10,11]", "[0,1,2,3,4,5,6,7,8,9,11]");
    assert_ignored(&["/0/0", "/1/1"], "[[1,2],[3,4]]", "[[2],[3]]");
    assert_ignored(&["/0"], r#"{"0":1,"1":2}"#, r#"{"1":2}"#);
}

#[test]
fn a_pointer_that_leads_nowhere_changes_nothing() {
    for pointer in ["/x", "/a/x", "/a/b/c", "/b/0/1", "/b/00", "/b/-", "/b/2", "/A", "/a/", "//a"] {
        assert_ignored(&[pointer], r#"{"a":{"b":1},"b":[1,2]}"#, r#"{"a":{"b":1},"b":[1,2]}"#);
    }
    assert_ignored(&["/a"], r#"[{"a":1}]"#, r#"[{"a":1}]"#);
    assert_ignored(&["/a"], r#"{"b":{"a":1}}"#, r#"{"b":{"a":1}}"#);
    assert_ignored(&["/a"], "1", "1");
}

#[test]
fn an_ignored_value_still_has_to_be_well_formed() {
    for value in ["", "01", "tru", "{", "{\"x\":1,\"x\":1}", "[1,]", "\"\\ud800\"", "NaN"] {
        let text = format!("{{\"a\":{value},\"b\":1}}");
        assert_eq!(canonical_ignoring(text.as_bytes(), &["/a"]), None, "{text}");
    }
}

#[test]
fn an_ignored_member_may_stand_there_once_only() {
    let doubtful =
        |ignored: &[&str], text: &str| assert_eq!(canonical_ignoring(text.as_bytes(), ignored), None, "{text}");
    doubtful(&["/a"], r#"{"a":1,"a":1}"#);
    doubtful(&["/a"], r#"{"a":1,"b":2,"\u0061":3}"#);
    doubtful(&["/b", "/a", "/a/c"], r#"{"a":1,"b":2,"a":3}"#);
    doubtful(&["/x/a"], r#"{"x":{"a":1,"a":2}}"#);
    doubtful(&["/a/b"], r#"{"a":{"b":1},"a":{"b":1}}"#);
    assert_ignored(&["/a", "/a"], r#"{"a":1,"b":2}"#, r#"{"b":2}"#);
    assert_ignored(&["/a", "/b", "/b/0"], r#"{"a":1,"b":2}"#, "{}");
    assert_ignored(&["/0/a", "/1/a"], r#"[{"a":1},{"a":1},{"a":1}]"#, r#"[{},{},{"a":1}]"#);
}
