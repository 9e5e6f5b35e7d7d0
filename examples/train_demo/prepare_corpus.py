"""Build the demo model's corpus and tokenizer from Debian and PyPI packages.

    python prepare_corpus.py --work build            # download, extract, tokenise
    python prepare_corpus.py --work build --no-download

Needs Debian 12 (`apt-get download`, `dpkg -x`), pip, and the Python packages
selectolax, tokenizers and numpy. Nothing is installed from the packages; only
their documentation text is read.

Output, in --work: `corpus/PACKAGE.jsonl` (one document a line: title, section
list, split), `tokenizer/` (Hugging Face layout), `train.npy`, `chat.npy` and
`heldout.npz` (uint16 token ids), `NOTICE`, `stats.json`.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import pathlib
import random
import re
import subprocess
import zipfile

import numpy as np

# licences.txt names every package and the licence of its documentation. The copyright file of
# each is read here by script (copyright_ok): all of its License fields must be permissive, those
# of debian/ (the packaging, not the text) aside. The packages in HAND_READ are not read again:
# their copyright file is free text, or lists other licences for files which are not the
# documentation (test data, vendored code, build scripts), and was judged by its licence list
# and by which files those are. botocore's licence is that of its package metadata.
# Read and left out for their licence, among others: asyncssh (EPL), brian (CeCILL), celery
# and kin (docs are CC-BY-SA), can, mdtraj, geos, psycopg, simpy 2 (LGPL), pika, hypothesis,
# bidict (MPL), haproxy, ns3, stem, mutagen, buildbot, pandoc (GPL), golang, qutip (CC-BY),
# netcdf (parts CC-BY), waitress, btrees (ZPL), pillow (HPND), curl, biopython, vim (their own).
ALLOWED = {"PSF-2.0", "PostgreSQL", "MIT", "ISC", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause",
           "Apache-2.0 WITH LLVM-exception", "MIT OR Apache-2.0", "public domain"}
PERMISSIVE = re.compile(r"(expat|mit|apache(-| )?v?2(\.0)?\+?|apache|bsd.*|.*-?bsd|[23]-?c(lause)?-?bsd|psf.*|"
                        r"python.*|isc|public[- ]?domain|cc0.*|postgresql|x11)$", re.I)
HAND_READ = set("""python3.11-doc postgresql-doc-15 sqlite3-doc rust-doc llvm-16-doc clang-16-doc
    llvm-19-doc clang-19-doc nodejs-doc erlang-doc apache2-doc cmake-doc lua5.1-doc sphinx-doc
    python-setuptools-doc python-jinja2-doc python-pandas-doc python-scipy-doc python-sympy-doc
    python-statsmodels-doc python-astropy-doc python-h5py-doc python-gevent-doc python-greenlet-doc
    python-rdflib-doc python-fonttools-doc python-lark-doc python-coverage-doc python-simpy3-doc
    python-pyopencl-doc python-pyparsing-doc python-pymatgen-doc python-django-doc
    python-django-allauth-doc python-django-extensions-doc python-babel-doc python-fsspec-doc
    python-itsdangerous-doc python-jsonschema-doc python-certbot-doc python-graphene-doc
    python-mako-doc python-markdown-doc python-requests-doc python-pygments-doc python-pint-doc
    python-pecan-doc python-dipy-doc python-nibabel-doc python-werkzeug-doc python-xarray-doc
    python-zstandard-doc python-vispy-doc python-tables-doc python-eventlet-doc python-future-doc
    python-txtorcon-doc python-wrapt-doc opencv-doc openvswitch-doc ovn-doc tomcat10-docs
    varnish-doc dpdk-doc krb5-doc libx11-doc libxml2-doc petsc3.18-doc groovy-doc gradle-doc
    libcommons-math3-java-doc swi-prolog-doc scala-doc sbcl-doc""".split())
LICENCE = {line.split(None, 1)[0]: line.split(None, 1)[1].strip()
           for line in (pathlib.Path(__file__).parent / "licences.txt").read_text().splitlines()
           if line and line[0] != "#"}
PYPI = {"botocore": "Apache-2.0"}  # service descriptions: HTML strings inside JSON
assert set(LICENCE.values()) | set(PYPI.values()) <= ALLOWED

CAP = 14_000_000        # bytes of text from any one package, so that no API reference dominates
HELDOUT_EVERY = 66      # about 1.5% of each package's documents
SKIP_FILES = re.compile(  # indexes, licence texts; pages under other terms than their package (pandas' cookbook, two of SWI-Prolog)
    r"(genindex|py-modindex|search\.html|_sources|_static|licen[sc]e|copying|copyright|"
    r"all\.html|/src/|contributors|cookbook|index-all|allclasses|package-tree|"
    r"class-use|bookindex|biblio|clpqr|nlp\.html|/fr/|/de/|/ja/|/ko/|/tr/|/es/|/da/|/pt-br/|/zh-cn/)", re.I)
DROP = ("script, style, pre, table, nav, header, footer, form, svg, math, dt, "
        ".sphinxsidebar, .related, .toctree-wrapper, .headerlink, .toc, #toc, #TOC, .contents, "
        ".navheader, .navfooter, .NAVHEADER, .NAVFOOTER, .sidebar, .highlight, .bottomnav, "
        ".pagination, .breadcrumbs, .code, .sphx-glr-footer, .math, .footnote, .citation, "
        ".viewcode-link, #quickview, .top, #topsection, #navtitle, .rightsidebar, .mobile-nav")
STOP = set("a an the of to in is are be and or that this it for on with as by if can not you "
           "when which from will at was used use has have".split())
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 8192
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")


def clean(text):
    """Collapse white space, drop permalink marks and reference brackets."""
    text = re.sub(r"\[\d+\]", "", text.replace("¶", "").replace("\u200b", ""))
    text = text.replace("’", "'").replace("‘", "'").replace("“", '"').replace("”", '"')
    return re.sub(r"\s+([.,;:)])", r"\1", re.sub(r"\s+", " ", text)).strip()


def is_prose(text, least=40):
    """True for an English sentence or more; False for code, tables, name lists."""
    if len(text) < least or len(text) > 4000 or text[-1] not in ".:!?)\"'":
        return False
    words = text.split()
    plain = sum(w.strip(".,:;!?()\"'").isalpha() for w in words)
    if len(words) < 6 or plain < 0.6 * len(words):
        return False
    if sum(w.lower().strip(".,:;") in STOP for w in words) < 0.17 * len(words):
        return False
    if sum(c.isascii() for c in text) < 0.98 * len(text):
        return False
    return not re.search(r"copyright \(c\)|©|all rights reserved|licen[sc]ed under|>>>|\\\\|"
                         r"New in version|Changed in version|created using Sphinx", text, re.I)


def sections(html):
    """HTML -> (title, [[heading, [paragraph, ...]], ...]), prose only.

    A list item is a paragraph that begins with "- ".
    """
    from selectolax.lexbor import LexborHTMLParser
    tree = LexborHTMLParser(html)
    for node in tree.css(DROP):
        node.decompose()
    body = tree.css_first("[role=main], main, article, #docContent, .body, .section") or tree.body
    out, title = [["", []]], ""
    if body is None:
        return title, []
    for node in body.css("h1, h2, h3, h4, h5, p, li, dd"):
        text = clean(node.text())
        tag = node.tag
        if tag[0] == "h" and tag[1:].isdigit():
            text = re.sub(r"^[\dA-Z.]*\d[\d.]*\s+", "", text)  # section numbers
            if tag == "h1" and not title:
                title = text[:100]
            out.append([text if 2 < len(text) < 90 else "", []])
        elif tag in ("li", "dd") and node.css_first("p, li, dd, div"):
            continue                                          # its children are visited
        elif tag == "li" and is_prose(text, 25):
            out[-1][1].append("- " + text)
        elif is_prose(text):
            inside_item = tag == "p" and node.parent is not None and node.parent.tag == "li"
            out[-1][1].append(("- " if inside_item else "") + text)
    return title, [s for s in out if s[1]]


def html_documents(root):
    """Yield (path, html) for every page of an unpacked package, each file once."""
    for path in sorted(root.rglob("*.html")) + sorted(root.rglob("*.html.en")) + sorted(root.rglob("*.xhtml")):
        if path.is_symlink() or SKIP_FILES.search(str(path.relative_to(root))):
            continue
        if path.stat().st_size < 6_000_000:
            yield str(path.relative_to(root)), path.read_text(errors="ignore")


def botocore_documents(wheel):
    """Yield one HTML page an AWS service: its newest API version's descriptions."""
    newest = {}
    import gzip
    with zipfile.ZipFile(wheel) as z:
        for name in sorted(z.namelist()):
            if re.search(r"/service-2\.json(\.gz)?$", name):
                newest[name.split("/")[-3]] = name
        for service, name in newest.items():
            raw = z.read(name)
            api = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
            title = api["metadata"].get("serviceFullName", service)
            page = [f"<main><h1>{title}</h1>{api.get('documentation', '')}"]
            for op, spec in api["operations"].items():
                if "documentation" in spec:
                    page.append(f"<h2>{op}</h2>{spec['documentation']}")
            for shape, spec in api["shapes"].items():
                if len(spec.get("documentation", "")) > 100:
                    page.append(f"<h2>{shape}</h2>{spec['documentation']}")
            yield service, "".join(page) + "</main>"


def copyright_ok(root):
    """True if the unpacked package's copyright file names permissive licences only."""
    text = "".join(f.read_text(errors="ignore") for f in root.glob("usr/share/doc/*/copyright") if f.exists())
    stanzas = re.findall(r"^Files:(.*?)(?=^License:)^License:[ \t]*(.*?)$", text, re.M | re.S)
    packaging = {lic.strip() for files, lic in stanzas if "debian/" in files}
    names = {lic.strip() for lic in re.findall(r"^License:[ \t]*(\S.*)$", text, re.M)}
    return bool(stanzas) and all(PERMISSIVE.match(n) or n in packaging for n in names)


def extract(job):
    """Package -> corpus/PACKAGE.jsonl. Returns (package, documents, bytes)."""
    package, work = job
    target = work / "corpus" / f"{package}.jsonl"
    if not (package in PYPI or package in HAND_READ or copyright_ok(work / "x" / package)):
        print("LEFT OUT, copyright file not permissive throughout:", package, flush=True)
        target.unlink(missing_ok=True)
        return package, 0, 0
    source = (botocore_documents(next((work / "pypi").glob("botocore-*.whl"))) if package in PYPI
              else html_documents(work / "x" / package))
    size = count = 0
    seen = set()
    with target.open("w") as f:
        docs = list(source)
        random.Random(0).shuffle(docs)
        for path, html in docs:
            if size > CAP:
                break
            title, parts = sections(html)
            kept = []
            for heading, paragraphs in parts:
                # Headers repeated on each page and API text in several copies: once a package.
                new = [p for p in paragraphs if key(p) not in seen]
                seen.update(map(key, new))
                if new:
                    kept.append([heading, new])
            n = sum(len(p) for _, ps in kept for p in ps)
            if n < 200:
                continue
            digest = int(hashlib.sha1(f"{package}/{path}".encode()).hexdigest(), 16)
            split = "heldout" if digest % HELDOUT_EVERY == 0 else "train"
            f.write(json.dumps({"path": path, "title": title, "split": split, "sections": kept}) + "\n")
            size, count = size + n, count + 1
    return package, count, size


def key(paragraph):
    """What counts as the same paragraph: letters only, numbers and names' case apart."""
    return hash(re.sub(r"[^a-z]+", " ", paragraph.lower()))


def deduplicate(work):
    """Drop paragraphs seen in another package, and templated ones (the same first or last
    six words for the 13th time). Training documents go first, so that no held-out paragraph
    occurs in training. Returns {split: [(package, title, sections)]}."""
    docs = []
    for package in sorted(LICENCE) + sorted(PYPI):
        file = work / "corpus" / f"{package}.jsonl"
        for line in file.open() if file.exists() else ():
            docs.append((package, json.loads(line)))
    docs.sort(key=lambda d: d[1]["split"] == "heldout")
    seen, starts, ends = set(), collections.Counter(), collections.Counter()
    out = {"train": [], "heldout": []}
    for package, doc in docs:
        kept = []
        for heading, paragraphs in doc["sections"]:
            new = []
            for p in paragraphs:
                words = p.lower().split()
                first, last, k = hash(tuple(words[:6])), hash(tuple(words[-6:])), key(p)
                if k in seen or starts[first] >= 12 or ends[last] >= 12:
                    continue
                seen.add(k)
                starts[first] += 1
                ends[last] += 1
                new.append(p)
            if new:
                kept.append([heading, new])
        if sum(len(p) for _, ps in kept for p in ps) >= 200:
            out[doc["split"]].append((package, doc["title"], kept))
    return out


def as_text(title, parts):
    """One document as plain text: headings and paragraphs, a blank line between."""
    lines = []
    for heading, paragraphs in parts:
        if heading:
            lines.append(heading)
        lines += paragraphs
    return re.sub(r"\n\n- ", "\n- ", "\n\n".join(lines))


def project(package):
    """Debian or PyPI package name -> the project's name as a person would type it."""
    name = re.sub(r"^python3?-|-docs?$|-data$|-doc-15$|[\d.]+-doc$|-16-doc$", "", package)
    name = re.sub(r"^python3\.11.*", "python", name)
    proper = {"django": "Django", "postgresql": "PostgreSQL", "sqlite3": "SQLite", "sqlite": "SQLite",
              "python": "Python", "erlang": "Erlang", "llvm": "LLVM", "clang": "Clang", "rust": "Rust",
              "cmake": "CMake", "nodejs": "Node.js", "sqlalchemy": "SQLAlchemy", "scipy": "SciPy",
              "sklearn": "scikit-learn", "skimage": "scikit-image", "apache2": "the Apache HTTP server",
              "tomcat10": "Tomcat", "botocore": "AWS", "opencv": "OpenCV", "sympy": "SymPy",
              "ghc": "Haskell", "flask": "Flask", "twisted": "Twisted", "lua5.1": "Lua", "ruby3.1": "Ruby"}
    return proper.get(name, name)


def chat_turns(documents, rng):
    """Sections as question and answer: [(user, assistant)]. A heading that asks is the
    question itself; of the others a quarter becomes "Explain X in PROJECT." or the like."""
    turns = []
    for package, title, parts in documents:
        name = project(package)
        for heading, paragraphs in parts:
            if not heading or len(heading) < 5 or paragraphs[0].startswith("- "):
                continue
            answer = []
            for p in paragraphs:
                if sum(map(len, answer)) + len(p) > 900:
                    break
                answer.append(p)
            answer = as_text("", [["", answer]])
            if len(answer) < 120 or answer.endswith(":"):
                continue
            if heading.endswith("?"):
                turns.append((heading, answer))
            elif rng.random() < 0.25 and len(heading.split()) <= 7 and not re.search(r"[_(){}\\]|::", heading):
                topic = heading.rstrip(".:")
                turns.append((rng.choice([
                    f"Explain {topic} in {name}.", f"What is {topic} in {name}?",
                    f"{name}: {topic}", f"Tell me about {topic} ({name}).",
                    f"What does the {name} documentation say about {topic}?", f"{topic}?"]), answer))
    return turns


def train_tokenizer(texts, folder):
    """Byte-level BPE of VOCAB entries on an iterator of texts, saved in Hugging Face layout."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    # Qwen's own normaliser and split: transformers' tokenizer class for this model type sets
    # them whatever the file says.
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    assert tok.get_vocab_size() == VOCAB
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None,
        "add_bos_token": False, "clean_up_tokenization_spaces": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": TEMPLATE}, indent=1) + "\n")
    return tok


def encode(tok, texts):
    """Texts -> one uint16 array, each text closed by <|endoftext|> (id 0)."""
    pieces = []
    for i in range(0, len(texts), 2000):
        for e in tok.encode_batch(texts[i:i + 2000]):
            pieces.append(np.array(e.ids + [0], np.uint16))
    return np.concatenate(pieces)


def download(work):
    """Fetch the .deb files and wheels by name and unpack them under work/x."""
    for sub in ("debs", "pypi", "x"):
        (work / sub).mkdir(parents=True, exist_ok=True)
    for package in LICENCE:
        if not list((work / "debs").glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=work / "debs", check=True)
        if not (work / "x" / package).exists():
            deb = next((work / "debs").glob(f"{package}_*.deb"))
            subprocess.run(["dpkg", "-x", deb, work / "x" / package], check=True)
    subprocess.run(["pip", "download", "-q", "--no-deps", "-d", work / "pypi", *PYPI], check=True)


def versions(work):
    """{package: version as downloaded}."""
    out = {}
    for package in LICENCE:
        deb = next((work / "debs").glob(f"{package}_*.deb"), None)
        if deb:
            out[package] = deb.name.split("_")[1].replace("%3a", ":")
    for package in PYPI:
        out[package] = next((work / "pypi").glob(f"{package}-*.whl")).name.split("-")[1]
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--work", type=pathlib.Path, required=True)
    ap.add_argument("--no-download", action="store_true")
    ap.add_argument("--no-extract", action="store_true")
    args = ap.parse_args()
    work = args.work
    (work / "corpus").mkdir(parents=True, exist_ok=True)
    if not args.no_download:
        download(work)
    if not args.no_extract:
        jobs = sorted(((p, work) for p in [*LICENCE, *PYPI]), key=lambda j: j[0] != "rust-doc")
        with multiprocessing.Pool() as pool:
            for package, count, size in pool.imap_unordered(extract, jobs, chunksize=1):
                print(f"{package:40s} {count:6d} documents {size / 1e6:7.2f} MB", flush=True)

    docs = deduplicate(work)
    rng = random.Random(1)
    rng.shuffle(docs["train"])
    texts = [as_text(t, s) for _, t, s in docs["train"]]
    print("train", len(texts), "documents", sum(map(len, texts)) / 1e6, "MB", flush=True)
    turns = chat_turns(docs["train"], rng)
    tok = train_tokenizer((t for t in rng.sample(texts, len(texts) // 3)), work / "tokenizer")

    train = encode(tok, texts)
    chats = ["<|im_start|>user\n" + u + "<|im_end|>\n<|im_start|>assistant\n" + a + "<|im_end|>\n"
             for u, a in turns]
    rng.shuffle(chats)
    chat = encode(tok, chats)
    np.save(work / "train.npy", train)
    np.save(work / "chat.npy", chat)
    held = collections.defaultdict(list)
    for package, title, parts in docs["heldout"]:
        held[package].append(as_text(title, parts))
    np.savez_compressed(work / "heldout.npz", **{p: encode(tok, t) for p, t in held.items()})
    (work / "heldout.json").write_text(json.dumps(held))

    version = versions(work)
    used = collections.Counter()
    for (package, _, _), text in zip(docs["train"], texts):
        used[package] += len(text.encode())
    rows = [f"{p:36s} {version.get(p, ''):32s} {LICENCE.get(p) or PYPI[p]}" for p in sorted(used)]
    (work / "NOTICE").write_text(
        "The demo model's weights and tokenizer were trained on documentation text from these\n"
        "packages (Debian 12, the last one from PyPI), each under the permissive licence named.\n"
        "Their copyright holders are named in each package's own copyright file.\n\n"
        f"{'package':36s} {'version':32s} licence\n" + "\n".join(rows) + "\n")
    (work / "stats.json").write_text(json.dumps({
        "train_tokens": len(train), "chat_tokens": len(chat), "chat_turns": len(turns),
        "train_bytes": sum(used.values()), "bytes_per_token": sum(used.values()) / len(train),
        "heldout_bytes": {p: sum(len(t.encode()) for t in ts) for p, ts in held.items()},
        "train_bytes_by_package": dict(used.most_common())}, indent=1))
    print(open(work / "stats.json").read()[:400])


if __name__ == "__main__":
    main()
