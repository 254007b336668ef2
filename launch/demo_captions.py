"""What the demo's captions say, in four scripts: one word list a language, one template a kind of content.

A caption is a function of its scene's attributes alone, so that two scenes of the same attributes read the same.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a demo sample shows beside its captions."""

    PICTURE = "picture"
    CLIP = "clip"
    SOUND = "sound"


AXES: dict[Kind, dict[str, int]] = {
    Kind.PICTURE: {"shape": 8, "colour": 8, "size": 2, "place": 9},
    Kind.CLIP: {"shape": 8, "colour": 8, "direction": 4, "pace": 2},
    Kind.SOUND: {"voice": 3, "pitch": 5, "contour": 3, "beats": 5, "pace": 2},
}
"""The attributes of a scene, and how many values each takes; attributes are named in this order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """One language: its words in the order of the attribute values, and how a caption is put together."""

    genders: str
    """The grammatical gender of each shape, as an index into the slash-separated forms of adjectives."""
    shape: str
    colour: str
    size: str
    place: str
    direction: str
    pace: str
    voice: str
    pitch: str
    contour: str
    beats: str
    picture: str
    clip: str
    sound: str


LANGUAGES: dict[str, Language] = {
    "en": Language(
        genders="00000000",
        shape="circle,square,triangle,diamond,star,cross,ring,heart",
        colour="red,orange,yellow,green,blue,purple,black,white",
        size="small,large",
        place="top left,top,top right,left,centre,right,bottom left,bottom,bottom right",
        direction="left,right,up,down",
        pace="slowly,quickly",
        voice="whistle,buzz,bell",
        pitch="deep,low,medium,high,piercing",
        contour="steady,rising,falling",
        beats="one beat,two beats,three beats,four beats,five beats",
        picture="{size} {colour} {shape}, {place}",
        clip="{colour} {shape} moving {direction} {pace}",
        sound="{pitch} {voice}, {contour}, {beats} {pace}",
    ),
    "el": Language(
        genders="02202021",
        shape="κύκλος,τετράγωνο,τρίγωνο,ρόμβος,αστέρι,σταυρός,δαχτυλίδι,καρδιά",
        colour="κόκκινος/κόκκινη/κόκκινο,πορτοκαλί,κίτρινος/κίτρινη/κίτρινο,πράσινος/πράσινη/πράσινο,μπλε,μωβ,μαύρος/μαύρη/μαύρο,άσπρος/άσπρη/άσπρο",
        size="μικρός/μικρή/μικρό,μεγάλος/μεγάλη/μεγάλο",
        place="πάνω αριστερά,πάνω,πάνω δεξιά,αριστερά,κέντρο,δεξιά,κάτω αριστερά,κάτω,κάτω δεξιά",
        direction="αριστερά,δεξιά,πάνω,κάτω",
        pace="αργά,γρήγορα",
        voice="σφύριγμα,βουητό,κουδούνισμα",
        pitch="βαθύ,χαμηλό,μεσαίο,υψηλό,διαπεραστικό",
        contour="σταθερό,ανοδικό,καθοδικό",
        beats="ένας χτύπος,δύο χτύποι,τρεις χτύποι,τέσσερις χτύποι,πέντε χτύποι",
        picture="{size} {colour} {shape}, {place}",
        clip="{colour} {shape} κινείται {direction} {pace}",
        sound="{pitch} {voice}, {contour}, {beats} {pace}",
    ),
    "hi": Language(
        genders="00000000",
        shape="वृत्त,वर्ग,त्रिभुज,हीरा,तारा,क्रॉस,छल्ला,दिल",
        colour="लाल,नारंगी,पीला,हरा,नीला,बैंगनी,काला,सफ़ेद",
        size="छोटा,बड़ा",
        place="ऊपर बाएँ,ऊपर,ऊपर दाएँ,बाएँ,बीच में,दाएँ,नीचे बाएँ,नीचे,नीचे दाएँ",
        direction="बाएँ,दाएँ,ऊपर,नीचे",
        pace="धीरे,तेज़",
        voice="सीटी,गूँज,घंटी",
        pitch="गहरी,नीची,मध्यम,ऊँची,तीखी",
        contour="स्थिर,चढ़ती,उतरती",
        beats="एक ताल,दो ताल,तीन ताल,चार ताल,पाँच ताल",
        picture="{size} {colour} {shape}, {place}",
        clip="{colour} {shape} {direction} जाता {pace}",
        sound="{pitch} {voice}, {contour}, {beats} {pace}",
    ),
    "zh": Language(
        genders="00000000",
        shape="圆形,方形,三角形,菱形,星形,十字形,圆环,心形",
        colour="红色,橙色,黄色,绿色,蓝色,紫色,黑色,白色",
        size="小,大",
        place="左上,上方,右上,左侧,中央,右侧,左下,下方,右下",
        direction="左,右,上,下",
        pace="缓慢,快速",
        voice="哨声,嗡声,铃声",
        pitch="低沉,低音,中音,高音,尖锐",
        contour="平稳,上升,下降",
        beats="一拍,两拍,三拍,四拍,五拍",
        picture="{size}的{colour}{shape},{place}",
        clip="{colour}{shape}向{direction}{pace}移动",
        sound="{pitch}的{voice},{contour},{pace}{beats}",
    ),
}
"""By ISO 639 code; English captions are the field `txt` of a sample, the others `<code>.txt`."""

SECOND_LANGUAGES = tuple(code for code in LANGUAGES if code != "en")


def caption(kind: Kind, attributes: tuple[int, ...], language: str = "en") -> str:
    """The caption of a scene; `attributes` are value numbers in the order of `AXES[kind]`."""
    words = LANGUAGES[language]
    named = dict(zip(AXES[kind], attributes, strict=True))
    gender = int(words.genders[named["shape"]]) if "shape" in named else 0

    def word(axis: str, value: int) -> str:
        listed: str = getattr(words, axis)
        forms = listed.split(",")[value].split("/")
        return forms[gender] if len(forms) > 1 else forms[0]

    parts = {axis: word(axis, value) for axis, value in named.items()}
    template: str = getattr(words, kind.value)
    return template.format(**parts)
